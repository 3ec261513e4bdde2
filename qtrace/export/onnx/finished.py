"""Changes of a finished ONNX model: ops in float16, and stored tensors in fewer bytes.

The exporter marks the nodes of each op that is to be in float16. A tensor keeps its name in float32, if that
is read. Scales of QuantizeLinear and DequantizeLinear stay float32: in float16 they make other integers.

An import stores what a file computes of constants, such as a grid of places or a mask. Runtimes do so, too,
when they load a file; the file itself is smaller if it has the nodes that compute it.

A file may store the rows of a table in 8 bits. Its float graph has the same numbers as floats, so the export
finds the integers again: exactly, or the table stays as it is. Only the rows that are read become floats.
"""

from __future__ import annotations

import base64
import contextlib
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper, shape_inference

from qtrace.errors import ExportError
from qtrace.export.converted import FLOAT16_KEY
from qtrace.export.onnx.exporter import OnnxExporter
from qtrace.export.onnx.opset import CopiedVersions, SourceVersions
from qtrace.graph.origin import hash_values, read_origin
from qtrace.graph.types import GetAttr
from qtrace.onnxfile import external_data
from qtrace.onnxfile.fragment import check_fragment
from qtrace.onnxfile.model import OnnxEditor, read_names, rename_tensors
from qtrace.preparation.float16 import loses

_FLOAT, _HALF = TensorProto.FLOAT, TensorProto.FLOAT16
_LARGEST = float(np.finfo(np.float16).max)

_BOUNDS = ("Clip", "Max", "Min")
_SCALED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Mul", "Div", "PRelu")
_ONE_TYPE = (
    "Add Sub Neg Abs Relu LeakyRelu Sigmoid Tanh HardSigmoid HardSwish Erf Softmax Concat Reshape Transpose "
    "Squeeze Unsqueeze Flatten Slice Split Gather GatherND Expand Tile Pad Where DepthToSpace SpaceToDepth "
    "Resize MaxPool AveragePool GlobalAveragePool GlobalMaxPool Identity Shape"
)
_TYPES = frozenset((*_ONE_TYPE.split(), *_BOUNDS, *_SCALED))
_IN_FLOAT32 = ("Resize",)
"""Inputs that ONNX has in float32 whatever the type of the values."""

_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Where", "Concat", "Expand", "Identity"}
"""What takes computed operands in every runtime, where a layer may need a stored weight."""


def write_float16(model: Any, marked: Mapping[str, str], kinds: Mapping[str, Any]) -> list[str]:
    """Writes nodes of a model in float16, and lists their ops in its metadata.

    An op stays float32 if a node of it lacks a float16 form, or float16 cannot hold one of its numbers.

    Args:
        model: an ONNX model with its tensors; it is changed in place.
        marked: first result of a node -> the op of the graph that it is of.
        kinds: tensor -> its numpy type, where the graph knows it.

    Returns:
        The ops in float16, by the names of their first outputs.
    """
    groups: dict[str, list[NodeProto]] = defaultdict(list)
    for node in model.graph.node:
        if node.output[0] in marked:
            groups[marked[node.output[0]]].append(node)
    if not groups:
        return []
    writer = _Writer(model, _types(model, kinds))
    chosen = {op: nodes for op, nodes in groups.items() if writer.fits(nodes)}
    names = [op for op, nodes in chosen.items() if any(writer.has_floats(node) for node in nodes)]
    writer.convert([node for nodes in chosen.values() for node in nodes])
    model.metadata_props.add(key=FLOAT16_KEY, value="\n".join(names))
    return names


def _types(model: Any, kinds: Mapping[str, Any]) -> dict[str, int]:
    """Returns tensor -> its ONNX type."""
    copy = external_data.skeleton(model)
    known = {info.name for info in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info)}
    for name, kind in kinds.items():
        if name not in known:
            copy.graph.value_info.append(helper.make_tensor_value_info(name, kind, None))
    inferred = shape_inference.infer_shapes(copy).graph
    infos = (*inferred.input, *inferred.output, *inferred.value_info)
    types = {info.name: info.type.tensor_type.elem_type for info in infos}
    return {**types, **{tensor.name: tensor.data_type for tensor in model.graph.initializer}}


class _Writer(OnnxEditor):
    """Converts nodes of a model.

    Args:
        model: the model; it is changed in place.
        types: tensor -> its ONNX type.
    """

    def __init__(self, model: Any, types: Mapping[str, int]) -> None:
        super().__init__(model)
        self.stored = {tensor.name: tensor for tensor in self.graph.initializer}  # without Constant nodes
        self.types = types
        self.halves: dict[str, str] = {}  # a float32 tensor -> the same in float16

    def has_floats(self, node: NodeProto) -> bool:
        """Whether a node gives floats."""
        return any(self.types.get(name) in (_FLOAT, _HALF) for name in node.output)

    def fits(self, nodes: Iterable[NodeProto]) -> bool:
        """Whether all nodes of an op have a form in float16, and all numbers a value."""
        for node in nodes:
            if any(self.types.get(name, 0) == 0 for name in (*node.input, *node.output) if name):
                return False
            places = self._read(node)
            if not places and not self.has_floats(node):
                continue  # of sizes
            if node.op_type not in _TYPES or node.domain:
                return False
            if not all(self._holds(node, place) for place in places if node.input[place] in self.stored):
                return False
        return True

    def _read(self, node: NodeProto) -> list[int]:
        """Returns the places of the inputs that become float16."""
        floats = [i for i, name in enumerate(node.input) if self.types.get(name) == _FLOAT]
        return [i for i in floats if not i or node.op_type not in _IN_FLOAT32]

    def _holds(self, node: NodeProto, place: int) -> bool:
        """Whether float16 holds a stored number well enough for what the node computes with it."""
        if node.op_type in _BOUNDS:
            return True  # what lies beyond float16 bounds nothing
        values = self._value(node.input[place])
        if np.abs(values).max(initial=0.0) > _LARGEST or np.isnan(values).any():
            return False
        is_bias = node.op_type in ("Conv", "ConvTranspose", "Gemm") and place == 2
        return node.op_type not in _SCALED or is_bias or not loses(values)

    def _value(self, name: str) -> np.ndarray:
        return numpy_helper.to_array(self.stored[name])

    def convert(self, nodes: list[NodeProto]) -> None:
        """Writes nodes in float16, and Casts around them."""
        chosen = {id(node) for node in nodes}
        wide = {name for node in self.nodes() if id(node) not in chosen for name in read_names(node)}
        wide |= self.output_names
        wide.update(name for node in nodes if node.op_type in _IN_FLOAT32 for name in node.input[1:])
        order: list[NodeProto] = []
        for node in self.nodes():
            if id(node) not in chosen:
                order.append(node)
                continue
            for place in self._read(node):
                node.input[place] = self._half(node.input[place], wide, order)
            order.append(node)
            for place, name in enumerate(node.output):
                if self.types.get(name) == _FLOAT:
                    node.output[place] = self._result(name, wide, order)
        self.set_nodes(_without_detours(order, self._all_halves(), self.output_names))
        self.drop_unread()
        self.finish()

    def _all_halves(self) -> set[str]:
        return {*self.halves.values(), *(name for name, kind in self.types.items() if kind == _HALF)}

    def _half(self, name: str, wide: set[str], order: list[NodeProto]) -> str:
        """Returns a float32 tensor in float16; it is stored or cast when it is first read so."""
        if name not in self.halves:
            if name in self.stored:
                self.halves[name] = self._store(name, wide)
            else:
                self.halves[name] = self.fresh(f"{name}_float16")
                order.append(_cast(name, self.halves[name], _HALF))
        return self.halves[name]

    def _store(self, name: str, wide: set[str]) -> str:
        """Stores a tensor in float16, under its own name if nobody reads it in float32."""
        values = np.clip(self._value(name), -_LARGEST, _LARGEST).astype(np.float16)
        if name in wide:
            return self.store(f"{name}_float16", values)
        self.stored[name].CopyFrom(numpy_helper.from_array(values, name))
        return name

    def _result(self, name: str, wide: set[str], order: list[NodeProto]) -> str:
        """Returns the name of a result in float16; where float32 is read, a Cast gives it its old name."""
        if name not in wide:
            self.halves[name] = name
            return name
        self.halves[name] = self.fresh(f"{name}_float16")
        order.append(_cast(self.halves[name], name, _FLOAT))
        return self.halves[name]


def _cast(source: str, result: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [source], [result], name=f"{result}_Cast", to=kind)


def _is_cast(node: NodeProto, kind: int) -> bool:
    return node.op_type == "Cast" and any(a.name == "to" and a.i == kind for a in node.attribute)


def _without_detours(nodes: list[NodeProto], halves: Container[str], outputs: set[str]) -> list[NodeProto]:
    """Leaves out Casts to float16 after Casts from it, as at the ends of a file that was in float16."""
    casts = (node for node in nodes if _is_cast(node, _FLOAT))
    sources = {node.output[0]: node.input[0] for node in casts if node.input[0] in halves}
    computed = {name for node in nodes for name in node.output}
    remaining, same, ends = list[NodeProto](), dict[str, str](), dict[str, str]()
    for node in nodes:
        if same:
            rename_tensors(node, same)
        if _is_cast(node, _HALF) and node.input[0] in sources:
            node.input[0] = sources[node.input[0]]
            if node.output[0] not in outputs:
                same[node.output[0]] = node.input[0]
                continue
            if node.input[0] in computed and node.input[0] not in ends:
                ends[node.input[0]] = node.output[0]
                continue
            node = helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name)
        remaining.append(node)
    for node in remaining if ends else ():
        rename_tensors(node, ends)
    return remaining


def write_computed(model: Any, exporter: OnnxExporter, integers: bool) -> None:
    """Writes stored operands of elementwise ops as the nodes of the imported file that compute them.

    Args:
        model: the model; it is changed in place.
        exporter: what wrote the model.
        integers: whether the target takes computed integers before a DequantizeLinear, too.
    """
    origin = read_origin(exporter.graph.module)
    programs = {} if origin is None else origin.programs
    if not programs:
        return
    editor, graph = OnnxEditor(model), model.graph
    values = {n.expr.name: v for n, v in exporter.graph.values.items() if isinstance(n.expr, GetAttr)}
    for tensor in list(graph.initializer):
        path = exporter.paths.get(tensor.name, "")
        if path not in programs or path not in values or tensor.name in editor.output_names:
            continue
        own, (key, text) = values[path], programs[path]
        if hash_values(own) != key:  # training or another pass has changed it
            continue
        readers = editor.readers.get(tensor.name, [])
        pair = _rounding(editor, tensor, own) if integers else None
        if pair is not None:
            readers = editor.readers.get(pair.output[0], [])
        stored = numpy_helper.to_array(tensor)
        same = stored.dtype == own.dtype and np.array_equal(stored, own)
        if not (same or pair) or not readers or not {r.op_type for r in readers} <= _ELEMENTWISE:
            continue
        data = base64.b64decode(text)
        if len(data) >= tensor.ByteSize() or check_fragment(data):
            continue
        program = onnx.load_from_string(data)
        with contextlib.suppress(ExportError):  # no form of an op in that opset
            program = CopiedVersions(editor.opset, SourceVersions()).converted(program, tensor.name)
            graph.initializer.remove(tensor)
            _insert(editor, program.graph, tensor.name, pair)
    editor.finish()


def _rounding(editor: OnnxEditor, tensor: Any, values: np.ndarray) -> Any:
    """Returns the DequantizeLinear of stored integers that are these values, rounded; else None."""
    readers = editor.readers.get(tensor.name, [])
    pair = readers[0] if len(readers) == 1 else None
    if pair is None or pair.op_type != "DequantizeLinear" or len(pair.input) != 3:
        return None
    levels, scale, zero = (numpy_helper.to_array(editor.stored[name]) for name in pair.input)
    if scale.size > 1 or levels.dtype.kind not in "iu" or levels.shape != values.shape:
        return None
    limits = np.iinfo(levels.dtype)
    rounded = np.clip(np.rint(values / scale) + zero.astype(np.float32), limits.min, limits.max)
    return pair if np.array_equal(rounded, levels) else None


def _insert(editor: OnnxEditor, program: Any, output: str, pair: Any) -> None:
    """Adds the nodes of a program before all others, and a rounding of the result for a DequantizeLinear."""
    results = [name for node in program.node for name in node.output if name]
    tensors = [*(tensor.name for tensor in program.initializer), *results]
    renamed = {old: editor.fresh(f"{output}_{old}") for old in tensors}
    if pair is None:
        renamed[program.output[0].name] = output
    for tensor in program.initializer:
        tensor.name = renamed[tensor.name]
    for node in program.node:
        rename_tensors(node, renamed)
        node.name = node.output[0]
    nodes = list(program.node)
    if pair is not None:
        result = renamed[program.output[0].name]
        nodes.append(helper.make_node("QuantizeLinear", [result, *pair.input[1:]], [output], name=output))
    editor.graph.initializer.extend(program.initializer)
    editor.set_nodes([*nodes, *editor.nodes()])


def write_integer_tables(model: Any) -> None:
    """Writes tables that only look-ups of rows read as integers, in place, where no number changes."""
    editor = OnnxEditor(model)
    for tensor in list(model.graph.initializer):
        readers = editor.readers.get(tensor.name, [])
        looked_up = all(
            node.op_type == "Gather" and node.input[0] == tensor.name and not any(a.i for a in node.attribute)
            for node in readers
        )
        if not readers or not looked_up or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2:
            continue
        table = _integers(numpy_helper.to_array(tensor))
        if table is None:
            continue
        nodes = sum(3 * node.ByteSize() for node in readers)  # that many nodes make the floats
        if table[0].nbytes + table[1].nbytes + nodes >= tensor.ByteSize():
            continue
        names = [
            editor.store(f"{tensor.name}_{end}", part)
            for part, end in zip(table, ("int", "scale", "zero"), strict=True)
            if end != "zero" or part
        ]
        for node in readers:
            _look_up(editor, node, names, table[1].ndim > 1)
    editor.drop_unread()
    editor.finish()


def _look_up(editor: OnnxEditor, node: Any, names: list[str], by_row: bool) -> None:
    """Lets a Gather read integers, and makes floats of the rows that it gives."""
    integers, scales, *zero = names
    output, rows = editor.rename_result(node, "_rows")
    floats = editor.fresh(f"{output}_levels")
    node.input[0] = integers
    editor.add_after(node, helper.make_node("Cast", [rows], [floats], name=floats, to=TensorProto.FLOAT))
    if zero:
        floats, levels = editor.fresh(f"{output}_less"), floats
        editor.add_after(node, helper.make_node("Sub", [levels, *zero], [floats], name=floats))
    if by_row:
        row_scales = editor.fresh(f"{output}_scales")
        editor.add_after(
            node, helper.make_node("Gather", [scales, node.input[1]], [row_scales], name=row_scales)
        )
        scales = row_scales
    name = editor.fresh(f"{output}_scaled")
    editor.add_after(node, helper.make_node("Mul", [floats, scales], [output], name=name))


def _integers(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Returns integers of 8 bits, scales and one zero point that make a table; None without them.

    There is one scale, one for each column, or one for each row, of shape (rows, 1).
    """
    if not np.isfinite(table).all() or not table.size:
        return None
    for rows, back in ((table.reshape(1, -1), table.shape), (table, table.shape), (table.T, None)):
        if _levels(rows[:1, : table.shape[1]]) is None or (found := _levels(rows)) is None:
            continue
        levels, scales = found[0].reshape(back) if back else found[0].T, found[1]
        scales = scales.reshape(() if len(rows) == 1 else (-1, 1) if back else (-1,))
        zero = np.float32(0 if np.abs(levels + 0.5).max() < 128 else -levels.min())
        if levels.max() + zero <= np.iinfo(np.uint8).max:
            return (levels + int(zero)).astype(np.uint8 if zero else np.int8), scales, np.array(zero)
    return None


def _levels(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the integers of rows and a scale for each; None if a row lacks them.

    Neighbours in order are one step apart, or several where levels are missing.
    """
    gaps = np.diff(np.sort(np.concatenate([rows, np.zeros((len(rows), 1), rows.dtype)], 1)))
    least = np.where(gaps > 0, gaps, np.inf).min(1).astype(np.float64)
    largest = np.abs(rows).max(1).astype(np.float64)
    integers, scales = np.zeros(rows.shape, np.int16), np.ones((len(rows), 1), np.float32)
    left, count = np.flatnonzero(largest), 0
    while left.size:
        count += 1
        last = np.rint(count * largest[left] / least[left])
        if (last > np.iinfo(np.uint8).max).any():
            return None
        near = (largest[left] / last).astype(np.float32)[:, None]
        done = np.zeros(len(left), bool)
        for scale in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))):
            levels = np.rint(rows[left] / scale)
            exact = (levels * scale == rows[left]).all(1) & ~done
            integers[left[exact]], scales[left[exact]] = levels[exact], scale[exact]
            done |= exact
        left = left[~done]
    return integers, scales
