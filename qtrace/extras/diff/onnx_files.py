"""What differs between two ONNX files of any tool."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto, ValueInfoProto, defs, helper

from qtrace.comparing.sums import sqnr_db
from qtrace.display import Displayed
from qtrace.onnxfile.external_data import load_model
from qtrace.onnxfile.model import OnnxModel
from qtrace.plugins.options import SHOWN_CHARACTERS

_ROUNDINGS = ("QuantizeLinear", "DequantizeLinear")
_ONES, _ZEROS = ("strides", "dilations"), ("pads",)


@dataclass(frozen=True)
class FileGrid:
    """The integers of a tensor.

    Attributes:
        type: the type of the integers, such as ``uint8``.
        scale: one scale, or one for each channel.
        zero_point: one zero point for each scale.
        axis: the axis of the channels.
    """

    type: str
    scale: np.ndarray
    zero_point: np.ndarray
    axis: int

    def __str__(self) -> str:
        """Returns the grid in words."""
        if self.scale.size != 1:
            return f"{self.type}, {self.scale.size} scales along axis {self.axis}"
        scale, zero = float(self.scale.reshape(-1)[0]), int(self.zero_point.reshape(-1)[0])
        return f"{self.type}, scale {scale:.4g}, zero point {zero}"


class OnnxSide(OnnxModel):
    """One of two files.

    Args:
        model: the model with its tensors.
    """

    @cached_property
    def computing(self) -> list[NodeProto]:
        """The nodes that compute, without roundings and constants."""
        own = [n for n in self.model.graph.node if n.op_type not in _ROUNDINGS]
        return [n for n in own if n.op_type != "Constant" or n.output[0] not in self.stored]

    def source(self, name: str) -> str:
        """Returns the tensor that ``name`` is a rounding of, and ``name`` itself where it is none."""
        for _ in range(len(self.model.graph.node)):
            node = self.producers.get(name)
            if node is None or node.op_type not in _ROUNDINGS or node.input[0] in self.stored:
                return name
            name = node.input[0]
        return name

    def read_grid(self, name: str) -> FileGrid | None:
        """Returns the integers that ``name`` is dequantized from; None for other tensors."""
        node = self.producers.get(name)
        return None if node is None or node.op_type != "DequantizeLinear" else self._grid(node)

    def written_grid(self, name: str) -> FileGrid | None:
        """Returns the integers that ``name`` is rounded to for all of its readers; None for other tensors."""
        readers = self.readers.get(name, [])
        if len(readers) != 1 or readers[0].op_type != "QuantizeLinear":
            return None
        return self._grid(readers[0])

    def roundings(self) -> Iterator[tuple[str, FileGrid]]:
        """Yields each tensor that is rounded, with its integers."""
        for node in self.model.graph.node:
            if node.op_type == "QuantizeLinear" and (grid := self._grid(node)) is not None:
                yield self.source(node.input[0]), grid

    @cached_property
    def parameters_by_name(self) -> dict[str, tuple[tuple[int, ...], str, np.ndarray | None]]:
        """Name -> shape, type in words, and values, of each stored tensor that a node reads.

        Integers with a scale have the name and the values of the tensor that is dequantized from them. The
        values are None where they lie in a file that is too large to be loaded.
        """
        result: dict[str, tuple[tuple[int, ...], str, np.ndarray | None]] = {}
        for name, tensor in self.stored.items():
            readers = self.readers.get(name, [])
            plain = [n for n in readers if n.op_type not in _ROUNDINGS]
            shape, kind = tuple(tensor.dims), _type_name(tensor.data_type)
            if plain:
                result[name] = shape, kind, self.value(name)
            for node in readers:
                if node.op_type == "DequantizeLinear" and node.input[0] == name:
                    grid = self._grid(node)
                    text = kind if grid is None else str(grid) if grid.scale.size > 1 else grid.type
                    result[node.output[0]] = shape, text, _dequantized(self.value(name), grid)
        return result

    def _grid(self, node: NodeProto) -> FileGrid | None:
        zero = self.stored.get(node.input[2]) if len(node.input) > 2 else None
        factors = self.value(node.input[1])
        if factors is None:
            return None
        offsets = np.zeros(factors.shape, np.int64) if zero is None else self.value(node.input[2])
        kind = "uint8" if zero is None else _type_name(zero.data_type)
        axis = next((int(a.i) for a in node.attribute if a.name == "axis"), 1)
        return FileGrid(kind, factors, np.asarray(offsets).astype(np.int64), axis)


def _dequantized(values: np.ndarray | None, grid: FileGrid | None) -> np.ndarray | None:
    if values is None or grid is None:
        return values
    shape = [-1 if axis == grid.axis % max(values.ndim, 1) else 1 for axis in range(values.ndim)]
    scale, zero = grid.scale, grid.zero_point
    if scale.size > 1:
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    return (values.astype(np.float64) - zero) * scale


def _type_name(kind: int) -> str:
    try:
        return str(np.dtype(helper.tensor_dtype_to_np_dtype(kind)).name)
    except (KeyError, TypeError, ValueError):
        return f"type {kind}"


def describe_value(info: ValueInfoProto) -> str:
    """Returns type and shape of an input or output: ``float32 [N, 3, ?, ?]``."""
    tensor = info.type.tensor_type
    sizes = [d.dim_param or (str(d.dim_value) if d.dim_value > 0 else "?") for d in tensor.shape.dim]
    shape = f"[{', '.join(sizes)}]" if tensor.HasField("shape") else "of any shape"
    return f"{_type_name(tensor.elem_type)} {shape}"


def attributes_of(node: NodeProto, opset: int) -> Mapping[str, Any]:
    """Returns the attributes of a node that say something else than its defaults."""
    try:
        schema = defs.get_schema(node.op_type, max_inclusive_version=max(opset, 1), domain=node.domain)
        defaults = {name: a.default_value for name, a in schema.attributes.items()}
    except defs.SchemaError:
        defaults = {}
    result: dict[str, Any] = {}
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        default = defaults.get(attribute.name)
        if default is not None and default.type and value == helper.get_attribute_value(default):
            continue
        ones, zeros = attribute.name in _ONES, attribute.name in _ZEROS
        if (ones and all(n == 1 for n in value)) or (zeros and not any(value)):
            continue
        result[attribute.name] = value
    return result


_SECTIONS = ("file", "metadata", "inputs and outputs", "nodes", "stored tensors", "rounded tensors")


@dataclass(frozen=True)
class FileChange:
    """One difference.

    Attributes:
        section: what it is about: ``file``, ``metadata``, ``inputs and outputs``, ``nodes``,
            ``stored tensors`` or ``rounded tensors``.
        sign: ``-`` for what the second file lacks, ``+`` for what it has besides, ``~`` for what
            differs.
        name: the node, tensor or key.
        text: the difference in words.
    """

    section: str
    sign: str
    name: str
    text: str


@dataclass(frozen=True, repr=False)
class FileDifference(Displayed):
    """The differences between two ONNX files.

    Attributes:
        changes: the differences, section by section.
        unchanged: section -> the number of its entries that are alike.
    """

    changes: tuple[FileChange, ...]
    unchanged: dict[str, int]

    @property
    def empty(self) -> bool:
        """Whether nothing differs."""
        return not self.changes

    def table(self, max_width: int | None = None, limit: int | None = 20) -> str:
        """Returns the differences as text.

        Args:
            max_width: the most characters of a line; None for no limit.
            limit: the most lines of a section; None for all.
        """
        parts = []
        for section in _SECTIONS:
            changes = [change for change in self.changes if change.section == section]
            if section == "stored tensors":
                changes.sort(key=lambda change: "~-+".index(change.sign))
            if not changes:
                continue
            counts = Counter(change.sign for change in changes)
            words = [
                f"{counts[s]} {w}" for s, w in (("-", "gone"), ("+", "new"), ("~", "changed")) if counts[s]
            ]
            words += [f"{self.unchanged[section]} alike"] if self.unchanged.get(section) else []
            lines = [f"{section}: {', '.join(words)}"]
            lines += [f"  {c.sign} {c.name}: {c.text}" if c.text else f"  {c.sign} {c.name}" for c in changes]
            shown = len(lines) if limit is None else limit + 1
            if len(lines) > shown:
                lines[shown:] = [f"  ... and {len(lines) - shown} more"]
            parts.append("\n".join(_cut(line, max_width) for line in lines))
        return "\n\n".join(parts) or "the files are alike"

    def to_dict(self) -> dict[str, Any]:
        """Returns the differences as plain data."""
        return {"changes": [asdict(change) for change in self.changes], "unchanged": self.unchanged}


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else f"{line[: max(width - 3, 1)]}..."


def compare_files(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> FileDifference:
    """Compares two ONNX files.

    Nodes are paired by name, then by the name of their first result. A rounding between two nodes is no node
    of its own here: the node says on which integers it runs.

    Args:
        first: a file, such as a float network.
        second: another file, such as its export.

    Raises:
        ExportError: when a file is missing or damaged.
    """
    a, b = (OnnxSide(load_model(Path(path))[0]) for path in (first, second))
    unchanged: dict[str, int] = {}
    changes: list[FileChange] = []
    for section, pairs in (
        ("file", _facts(a, b)),
        ("metadata", _texts(_metadata(a), _metadata(b))),
        ("inputs and outputs", _ends(a, b)),
        ("nodes", _nodes(a, b)),
        ("stored tensors", _parameters(a, b)),
        ("rounded tensors", _texts(*({n: str(g) for n, g in side.roundings()} for side in (a, b)))),
    ):
        for entry in pairs:
            if entry is None:
                unchanged[section] = unchanged.get(section, 0) + 1
            else:
                changes.append(FileChange(section, *entry))
    return FileDifference(tuple(changes), unchanged)


_Entry = tuple[str, str, str] | None


def _metadata(side: OnnxSide) -> dict[str, str]:
    return {key: _short(text) for key, text in side.metadata.items()}


def _short(text: str) -> str:
    line = repr(text)
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}... ({len(text)} characters)"


def _facts(a: OnnxSide, b: OnnxSide) -> Iterator[_Entry]:
    def read(side: OnnxSide) -> dict[str, str]:
        model = side.model
        facts = {f"opset {o.domain or 'ai.onnx'}": str(o.version) for o in model.opset_import}
        facts["ir_version"] = str(model.ir_version)
        facts["producer"] = f"{model.producer_name} {model.producer_version}".strip()
        facts |= {"domain": model.domain, "model_version": str(model.model_version)}
        facts |= {"doc_string": _short(model.doc_string), "graph": model.graph.name}
        return facts | {"graph's doc_string": _short(model.graph.doc_string)}

    yield from _texts(read(a), read(b))


def _texts(first: dict[str, str], second: dict[str, str]) -> Iterator[_Entry]:
    """Compares two tables of texts."""
    for name in dict.fromkeys((*first, *second)):
        if name not in second:
            yield "-", name, first[name]
        elif name not in first:
            yield "+", name, second[name]
        else:
            old, new = first[name], second[name]
            yield None if old == new else ("~", name, f"{old or 'none'} -> {new or 'none'}")


def _ends(a: OnnxSide, b: OnnxSide) -> Iterator[_Entry]:
    for kind, first, second in (("input", a.inputs, b.inputs), ("output", a.outputs, b.outputs)):
        yield from _texts(*({f"{kind} {v.name}": _described(v) for v in side} for side in (first, second)))
        names = [[v.name for v in side] for side in (first, second)]
        if names[0] != names[1] and sorted(names[0]) == sorted(names[1]):
            yield "~", f"order of {kind}s", f"{', '.join(names[0])} -> {', '.join(names[1])}"


def _described(value: ValueInfoProto) -> str:
    doc = f" ({_short(value.doc_string)})" if value.doc_string else ""
    notes = ", ".join(f"{key}: {text}" for key, text in sorted(_notes(value).items()))
    return describe_value(value) + doc + (f" [{notes}]" if notes else "")


def _notes(part: NodeProto | ValueInfoProto) -> dict[str, str]:
    """Returns the metadata of a node, an input or an output: key -> text."""
    return {entry.key: _short(entry.value) for entry in part.metadata_props}


def _pair(a: OnnxSide, b: OnnxSide) -> dict[int, NodeProto]:
    """Returns position of a node of ``a`` -> its node of ``b``."""
    names = Counter(node.name for node in b.computing)
    by_name = {node.name: node for node in b.computing if node.name and names[node.name] == 1}
    pairs: dict[int, NodeProto] = {}
    taken: set[int] = set()
    for index, node in enumerate(a.computing):
        other = by_name.get(node.name)
        if other is not None and id(other) not in taken:
            pairs[index] = other
            taken.add(id(other))
    for index, node in enumerate(a.computing):
        other = b.producers.get(next(iter(node.output), ""))
        if (
            index not in pairs
            and other is not None
            and other.op_type == node.op_type
            and id(other) not in taken
        ):
            pairs[index] = other
            taken.add(id(other))
    return pairs


def _nodes(a: OnnxSide, b: OnnxSide) -> Iterator[_Entry]:
    pairs = _pair(a, b)
    for index, node in enumerate(a.computing):
        other = pairs.get(index)
        if other is None:
            yield "-", _label(node), _reason(node, b)
            continue
        text = "; ".join(_changed(a, b, node, other))
        yield ("~", _label(node), text) if text else None
    paired = {id(other) for other in pairs.values()}
    for node in b.computing:
        if id(node) not in paired:
            yield "+", _label(node), f"computes {', '.join(filter(None, node.output))}"


def _label(node: NodeProto) -> str:
    return f"{node.op_type} {node.name or next((o for o in node.output if o), '')}"


def _reason(node: NodeProto, b: OnnxSide) -> str:
    """Says what became of the results of a node that is gone."""
    for name in node.output:
        producer = b.producers.get(name)
        if name in b.parameters_by_name:
            return f"{name} is stored"
        if producer is not None:
            return f"{name} is computed by {_label(producer)}"
    return ""


def _changed(a: OnnxSide, b: OnnxSide, node: NodeProto, other: NodeProto) -> Iterator[str]:
    """Yields in what a node differs."""
    if node.op_type != other.op_type:
        yield f"is {other.op_type}"
    elif (first := _arithmetic(a, node)) != (second := _arithmetic(b, other)):
        yield f"runs on {second}" if first == "float" else f"runs on {second}, not on {first}"
    old, new = ([side.source(n) for n in x.input] for side, x in ((a, node), (b, other)))
    for one, two in zip(old, new, strict=False):
        if one != two and not _same_stored(a, b, one, two):
            yield f"reads {two or 'nothing'} instead of {one or 'nothing'}"
    yield from (f"reads {name}, too" for name in new[len(old) :] if name)
    yield from (f"does not read {name}" for name in old[len(new) :] if name)
    results = zip(node.output, other.output, strict=False)
    yield from (f"computes {two} instead of {one}" for one, two in results if one and two and one != two)
    if node.op_type == other.op_type:
        before, after = (attributes_of(x, s.opset) for s, x in ((a, node), (b, other)))
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name) and name != "kernel_shape":
                yield f"{name} is {_written(after.get(name))}, not {_written(before.get(name))}"
    yield from _changed_notes(node, other)


def _changed_notes(node: NodeProto, other: NodeProto) -> Iterator[str]:
    """Yields which metadata and document string of a node are others."""
    old, new = _notes(node), _notes(other)
    for notes, part in ((old, node), (new, other)):
        if part.doc_string:
            notes["doc_string"] = _short(part.doc_string)
    for key in dict.fromkeys((*old, *new)):
        if key not in new:
            yield f"has no {key} any more"
        elif old.get(key) != new[key]:
            yield f"{key} is {new[key]}" + (f", not {old[key]}" if key in old else "")


def _written(value: Any) -> str:
    if value is None:
        return "the default"
    return value.decode() if isinstance(value, bytes) else str(value)[:SHOWN_CHARACTERS]


def _same_stored(a: OnnxSide, b: OnnxSide, one: str, two: str) -> bool:
    """Whether two stored tensors of other names have equal values."""
    first, second = (side.parameters_by_name.get(n) for side, n in ((a, one), (b, two)))
    if first is None or second is None or first[2] is None or second[2] is None:
        return False
    return np.array_equal(first[2], second[2])


def _arithmetic(side: OnnxSide, node: NodeProto) -> str:
    """Returns the integers that a node runs on in words, ``float`` if an input is none."""
    grids = [side.read_grid(name) for name in node.input if name]
    known = [grid.type for grid in grids if grid is not None]
    if not known or grids[0] is None:
        return "float"
    written = [side.written_grid(name) for name in node.output if name]
    result = written[0].type if written and written[0] is not None else "float"
    return f"{' x '.join(known[:2])} -> {result}"


def _parameters(a: OnnxSide, b: OnnxSide) -> Iterator[_Entry]:
    first, second = a.parameters_by_name, b.parameters_by_name
    for name in dict.fromkeys((*first, *second)):
        if name not in second:
            yield "-", name, _tensor(first[name])
        elif name not in first:
            yield "+", name, _tensor(second[name])
        else:
            yield _changed_tensor(name, first[name], second[name])


def _tensor(entry: Sequence[Any]) -> str:
    return f"{entry[1]} {list(entry[0])}"


def _changed_tensor(name: str, first: Sequence[Any], second: Sequence[Any]) -> _Entry:
    (shape, kind, values), (new_shape, new_kind, new_values) = first, second
    parts = [] if kind == new_kind else [f"{kind} -> {new_kind}"]
    if shape != new_shape:
        parts.append(f"shape {list(shape)} -> {list(new_shape)}")
    elif values is not None and new_values is not None and not np.array_equal(values, new_values):
        ratio = sqnr_db(values.astype(np.float64), new_values.astype(np.float64))
        parts.append(f"values differ by {ratio:.1f} dB")
    return ("~", name, ", ".join(parts)) if parts else None
