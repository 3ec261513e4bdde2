"""A Graphviz document of a converted graph: ops as boxes; scheme, scale and zero point on the edges.

Blue edges carry integers, grey ones floats. Draw it with ``dot -Tsvg``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qtrace.export.converted import ConvertedGraph
from qtrace.export.document import DocumentOp, GraphDocument, TensorQuantization, Value, read_graph
from qtrace.export.format import Format
from qtrace.graph.views import quote
from qtrace.storage.outputs import WRITTEN

_FLOAT, _INTEGER, _BOX, _END = "#999999", "#1f5fbf", "#eef3fb", "#f5f5f5"


def files(converted: ConvertedGraph, path: Path) -> dict[Path, bytes]:
    """Returns the document.

    Args:
        converted: the graph of a converted module.
        path: the path of the document.
    """
    graph = read_graph(converted)
    lines = [
        f"digraph {quote(graph.name)} {{",
        f'  comment="{WRITTEN}";',
        f"  label={quote(f'{graph.name}, quantized for {graph.backend}')};",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=10];',
        '  edge [fontname="Helvetica", fontsize=8];',
    ]
    for op in graph.ops:
        lines.append(f"  {quote(op.name)} [label={_box(op)}, fillcolor={quote(_fill(op))}];")
        lines += [f"  {_edge(value, op.name)}" for value in op.inputs if value.producer]
    lines += _ends(graph)
    return {path: ("\n".join([*lines, "}"]) + "\n").encode()}


FORMAT = Format("dot", files, suffixes=(".dot", ".gv"), float_types=())


def _ends(graph: GraphDocument) -> list[str]:
    lines = []
    for index, value in enumerate(graph.outputs):
        name = f"output {index}" if len(graph.outputs) > 1 else "output"
        lines.append(f"  {quote(f'->{index}')} [label={quote(name)}, shape=oval, fillcolor={quote(_END)}];")
        if value.producer:
            lines.append(f"  {_edge(value, f'->{index}')}")
    return lines


def _fill(op: DocumentOp) -> str:
    """Returns the colour of an op: one for ops that read or write integers, one for all others."""
    ends = op.kind in ("input", "constant")
    return _BOX if not ends and any(v.quantized for v in (*op.inputs, *op.outputs)) else _END


def _box(op: DocumentOp) -> str:
    lines = [op.label if op.kind in ("", op.label) else f"{op.kind}", op.name]
    for key, value in op.weights.items():
        sizes = "x".join(map(str, value.shape))
        kind = value.dtype if value.quantized is None else _numbers(value.quantized)
        lines.append(f"{key} {sizes} {kind}")
    return quote("\n".join(lines))


def _edge(value: Value, reader: str) -> str:
    text = "x".join(map(str, value.shape)) or "scalar"
    color = _FLOAT
    if value.quantized is not None:
        text, color = f"{_numbers(value.quantized)}\n{text}", _INTEGER
    elif value.dtype != "float32":
        text = f"{value.dtype}\n{text}"
    return (
        f"{quote(value.producer)} -> {quote(reader)} "
        f"[label={quote(text)}, color={quote(color)}, fontcolor={quote(color)}];"
    )


def _numbers(quantized: TensorQuantization) -> str:
    parts = [quantized.scheme, f"s={_range(quantized.scale)}"]
    if np.any(quantized.zero_point):
        parts.append(f"z={_range(quantized.zero_point)}")
    return " ".join(parts)


def _range(values: np.ndarray) -> str:
    """Formats one number, or the smallest and the largest of several."""
    ends = dict.fromkeys((values.min().item(), values.max().item()))
    return "..".join(f"{v:.4g}" for v in ends)
