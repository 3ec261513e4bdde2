"""Says whether an ONNX file holds for other sizes of open axes: it is written for these, and compared."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from qtrace.export.onnx.writer import OnnxWriter
from qtrace.onnxfile.bodies import read_names

__all__ = ["first_difference"]


def first_difference(first: OnnxWriter, second: OnnxWriter) -> str:
    """Returns the first node of ``first`` that ``second``, of the same graph at another size, has otherwise.

    Returns:
        Its op and its name; "" if both files are equal.
    """
    for one, other in zip(first.nodes, second.nodes, strict=False):
        if one != other or not _reads_same(first, second, one):
            return f"{one.op_type} {one.output[0]!r}"
    if len(first.nodes) != len(second.nodes):
        return f"{_last(first.nodes)}"
    return ""


def _reads_same(first: OnnxWriter, second: OnnxWriter, node: onnx.NodeProto) -> bool:
    """Returns whether the stored tensors that a node reads are the same in two writers."""
    pairs = [(first.initializers.get(n), second.initializers.get(n)) for n in read_names(node)]
    return all(a is b or (a and b and a.raw_data == b.raw_data) for a, b in pairs)


def _last(nodes: Sequence[onnx.NodeProto]) -> str:
    return f"{nodes[-1].op_type} {nodes[-1].output[0]!r}" if nodes else "the graph"
