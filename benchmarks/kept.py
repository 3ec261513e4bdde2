"""What quantized files keep of their own: ``python -m benchmarks.kept FILE[=SHAPE] ... [--zoo] [--write]``.

Each file is imported, quantized on random data by the default recipe of onnxruntime, and exported. What it
says of itself is looked up in the quantized file, and `qtrace diff` lists the changes. ``SHAPE`` is that of
the only input if the file leaves axes open, such as ``net.onnx=1x3x48x160``. ``--zoo`` adds networks of the
tests' zoo, which qtrace exports and which get metadata and document strings. The exit code is 1 if anything
is lost.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

import qtrace
from qtrace.extras.diff.onnx_files import compare_files
from qtrace.importing.onnx import open_inputs
from tests.zoo.catalog import CNN

__all__ = ["FILE", "KeptRow", "compare", "main", "quantized"]

# The rows of the page.
FILE = Path(__file__).parent / "results" / "kept.json"
_ZOO = ("mobilenet_v3", "resnet_bottleneck", "unet_bilinear", "ghostnet")
_GRAPH, _NODES = "graph", "nodes"
_OPEN = ""  # an open axis without a name, which gets one


@dataclass(frozen=True)
class KeptRow:
    """What one file keeps.

    Attributes:
        file: its name.
        tool: the tool that wrote it.
        said: the number of its texts: metadata, document strings and names of the model, the graph, inputs
            and outputs, and of nodes that still exist; names, types and axes of inputs and outputs.
        lost: those that are gone or otherwise, each in words.
        opened: whether the file has a number for the batch, which is open in the quantized one.
        opset: the opset of the file, and that of the quantized one.
        nodes: how many nodes of the file have a name, and how many of these names still exist.
        changes: section of `qtrace diff` -> gone, new, changed and alike entries.
    """

    file: str
    tool: str
    said: int
    lost: tuple[str, ...]
    opened: bool
    opset: tuple[int, int]
    nodes: tuple[int, int]
    changes: dict[str, tuple[int, int, int, int]]

    HEADER = ("file", "written by", "kept of what it says", "opset", "node names kept", "nodes by `diff`")

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        gone, new, changed, alike = self.changes.get(_NODES, (0, 0, 0, 0))
        lost = f"; lost: {', '.join(self.lost)}" if self.lost else ""
        return (
            f"`{self.file}`",
            self.tool,
            f"{self.said - len(self.lost)} of {self.said}{lost}{', batch opened' if self.opened else ''}",
            " to ".join(map(str, dict.fromkeys(self.opset))),
            f"{self.nodes[1]} of {self.nodes[0]}",
            f"{gone} gone, {new} new, {changed} changed, {alike} alike",
        )


def compare(first: Path, second: Path, name: str) -> KeptRow:
    """Compares a file and what became of it.

    Args:
        first: the file.
        second: the quantized one.
        name: the name of the file in the table.
    """
    old, new = (onnx.load(path, load_external_data=False) for path in (first, second))
    opened = _opens_batch(old, new)
    ends = list(_ends(old, new))
    names = {node.name for node in new.graph.node}
    before, after = dict(_words(old, names)), dict(_words(new, names))
    lost = [key for key, text in before.items() if after.get(key) != text]
    lost += [kind for kind, kept in ends if not kept]
    named = [node.name for node in old.graph.node if node.name]
    difference = compare_files(first, second)
    counts = Counter((change.section, change.sign) for change in difference.changes)
    sections = dict.fromkeys((*(section for section, _ in counts), *difference.unchanged))
    changes = {
        s: (counts[s, "-"], counts[s, "+"], counts[s, "~"], difference.unchanged.get(s, 0)) for s in sections
    }
    return KeptRow(
        name,
        f"{old.producer_name} {old.producer_version}".strip() or "not said",
        len(before) + len(ends),
        tuple(lost),
        opened,
        (_opset(old), _opset(new)),
        (len(named), len(names.intersection(named))),
        changes,
    )


def _words(model: onnx.ModelProto, nodes: set[str]) -> Iterator[tuple[str, str]]:
    """Yields what a model says of itself, but for what qtrace says: place and key -> text."""
    facts = {"doc_string": model.doc_string, "domain": model.domain, "graph": model.graph.name}
    facts |= {"version": str(model.model_version or ""), "graph's doc_string": model.graph.doc_string}
    yield from ((key, text) for key, text in facts.items() if text)
    own = [node for node in model.graph.node if node.name and node.name in nodes]
    parts: list[tuple[str, Any]] = [("model", model), (_GRAPH, model.graph)]
    parts += [(end.name, end) for end in (*model.graph.input, *model.graph.output)]
    parts += [(node.name, node) for node in own]
    for place, part in parts:
        for fact in part.metadata_props:
            if not fact.key.startswith("qtrace."):
                yield f"{place}: {fact.key}", fact.value
        if place not in ("model", _GRAPH) and part.doc_string:
            yield f"{place}: doc_string", part.doc_string


def _ends(old: onnx.ModelProto, new: onnx.ModelProto) -> Iterator[tuple[str, bool]]:
    """Yields whether names and order, types and axes of inputs and of outputs are those of the first file."""
    for kind in ("input", "output"):
        first, second = (_values(model, kind) for model in (old, new))
        yield f"names and order of {kind}s", [v.name for v in first] == [v.name for v in second]
        types = [[v.type.tensor_type.elem_type for v in side] for side in (first, second)]
        yield f"types of {kind}s", types[0] == types[1]
        pairs = [(_axes(v), _axes(w)) for v, w in zip(first, second, strict=False)]
        yield f"axes of {kind}s", all(len(a) == len(b) and all(map(_is_kept, a, b)) for a, b in pairs)


def _values(model: onnx.ModelProto, kind: str) -> list[onnx.ValueInfoProto]:
    """Returns the inputs or the outputs; old files list stored tensors among the inputs."""
    stored = {tensor.name for tensor in model.graph.initializer}
    return [value for value in getattr(model.graph, kind) if value.name not in stored]


def _axes(value: onnx.ValueInfoProto) -> list[int | str]:
    """Returns the sizes of the axes, and the names of open ones, of which the first may be the batch."""
    axes = value.type.tensor_type.shape.dim
    sizes: list[int | str] = [d.dim_param or (int(d.dim_value) if d.dim_value > 0 else _OPEN) for d in axes]
    return sizes


def _is_kept(own: int | str, other: int | str) -> bool:
    return own == other or (own == _OPEN and isinstance(other, str))


def _opens_batch(old: onnx.ModelProto, new: onnx.ModelProto) -> bool:
    """Opens the first axes of ``old`` that are open in ``new``; returns whether there are such."""
    opened = False
    for kind in ("input", "output"):
        for value, other in zip(*(_values(model, kind) for model in (old, new)), strict=False):
            axes, others = (v.type.tensor_type.shape.dim for v in (value, other))
            if axes and others and axes[0].dim_value > 0 and others[0].dim_param:
                axes[0].dim_param, opened = others[0].dim_param, True
    return opened


def _opset(model: onnx.ModelProto) -> int:
    return next(int(o.version) for o in model.opset_import if o.domain in ("", "ai.onnx"))


def quantized(path: Path, out: Path, shape: Sequence[int] | None = None) -> Path:
    """Quantizes a file on random data.

    Args:
        path: the file.
        out: where the quantized one is written.
        shape: the shape of its only input; None if the file says it.
    """
    names = open_inputs(path)
    shapes = None if shape is None else {name: tuple(shape) for name in names}
    traced = qtrace.from_onnx(path, shapes)
    random = np.random.default_rng(0)
    sizes = [tuple(int(n) for n in node.shape) for node in traced.graph.inputs[1:]]
    data = [tuple(random.standard_normal(size, np.float32) for size in sizes) for _ in range(2)]
    prepared = qtrace.prepare(traced, samples=data, progress=False)
    return qtrace.export(qtrace.convert(qtrace.calibrate(prepared, data, progress=False)), out)


def _of_zoo(folder: Path) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Writes networks of the zoo as files that say something of themselves; yields them with a shape."""
    for name in _ZOO:
        entry = next(entry for entry in CNN if entry.name == name)
        x = np.zeros((2, *entry.input_shape), np.float32)
        dynamic = {"x": {0: "batch", 2: "height", 3: "width"}}
        path = qtrace.export(qtrace.trace(entry.build(), x, dynamic=dynamic), folder / f"{name}.onnx")
        model = onnx.load(path)
        model.doc_string, model.graph.doc_string = f"{name}\nof the zoo", "random weights, ü"
        model.domain, model.model_version = "org.example", 3
        helper.set_model_props(model, {"classes": "cat\ndog", "stride": "32"})
        for end in (*model.graph.input, *model.graph.output):
            end.doc_string = f"about {end.name}"
        for node in model.graph.node:
            node.doc_string = f"about {node.name}"
        onnx.save(model, path)
        yield path, x.shape


def main(arguments: list[str] | None = None) -> int:
    """The command; returns 1 if a file loses something."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kept", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE[=SHAPE]", help="ONNX files in float")
    parser.add_argument("--zoo", action="store_true", help="networks of the tests' zoo, too")
    parser.add_argument("--diff", action="store_true", help="print the whole list of changes, too")
    parser.add_argument("--write", action="store_true", help=f"store the table in results/{FILE.name}")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    rows: list[KeptRow] = []
    with tempfile.TemporaryDirectory(prefix="qtrace-kept-") as name:
        folder = Path(name)
        pairs = (text.partition("=")[::2] for text in options.files)
        given = [(Path(path), [int(n) for n in size.split("x")] if size else None) for path, size in pairs]
        for path, shape in (*given, *(_of_zoo(folder) if options.zoo else ())):
            out = quantized(path, folder / "quantized.onnx", shape)
            title = path.name if path.stem != "float" else f"{path.parent.name}.onnx"
            rows.append(compare(path, out, title))
            print(f"| {' | '.join(rows[-1].cells())} |", flush=True)
            if options.diff:
                print(qtrace.diff(path, out).table(limit=None))
    if options.write:
        known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []
        stored = {row["file"]: row for row in (*known, *map(asdict, rows))}
        FILE.write_text(json.dumps([*stored.values()], indent=1) + "\n", encoding="utf-8")
    return int(any(row.lost for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
