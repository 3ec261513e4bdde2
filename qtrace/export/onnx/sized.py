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
        if one != other or _stored(first, one) != _stored(second, other):
            return f"{one.op_type} {one.output[0]!r}"
    if len(first.nodes) != len(second.nodes):
        return f"{_last(first.nodes)}"
    return ""


def _stored(writer: OnnxWriter, node: onnx.NodeProto) -> list[bytes]:
    tensors = (writer.initializers.get(name) for name in read_names(node))
    return [bytes(tensor.raw_data) for tensor in tensors if tensor is not None]


def _last(nodes: Sequence[onnx.NodeProto]) -> str:
    return f"{nodes[-1].op_type} {nodes[-1].output[0]!r}" if nodes else "the graph"
