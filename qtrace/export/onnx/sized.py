"""Says whether an ONNX file holds for other sizes of open axes: it is written for these, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import onnx

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.export.converted.graph import ConvertedOp
from qtrace.export.converted.open_axes import Types, resized
from qtrace.export.onnx.weight_layouts import CONVS, TRANSPOSED
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.inference import TensorType
from qtrace.graph.types import Node, TensorNode
from qtrace.onnxfile.model import read_names

__all__ = ["batch_problem", "first_difference", "size_problem"]

# Kinds whose ONNX form depends on no batch: most of a network, with nearly all of its numbers.
_WITHOUT_SIZES = frozenset((*CONVS, *TRANSPOSED, "linear", "matmul", "batch_norm", "relu", "relu6", "clip"))
_WITHOUT_SIZES |= {"add", "sub", "mul", "div"}


class OpWriter(Protocol):
    """What writes the ops of a graph."""

    writer: OnnxWriter
    graph: Any

    def prepare_writer(self) -> None:
        """Gives the writer what it needs before an op is written."""

    def emit(self, step: Any) -> None:
        """Writes one op or rounding."""

    def emit_all(self) -> None:
        """Writes all ops and roundings."""


def size_problem(first: OpWriter, other: OpWriter, types: Types) -> str:
    """Says which node of a file would be another one at other sizes.

    Args:
        first: what has written the file.
        other: an exporter of the same graph that has written nothing.
        types: the types of all tensors at other sizes.

    Returns:
        The end of a sentence; "" if the file holds for these sizes.
    """
    other.writer.known = first.writer.initializers
    with resized(types):
        if problem := _other_numbers(first):
            return problem
        try:
            other.emit_all()
        except ExportError as error:
            return str(error).rstrip(".")
    return _describe(first_difference(first.writer, other.writer))


def batch_problem(first: OpWriter, other: OpWriter, types: Types) -> str:
    """Says what `size_problem` does, for another batch, only by the ops that may hold the size of one.

    Args:
        first: an exporter of the graph that has written nothing.
        other: another one.
        types: the types of all tensors at another batch.
    """
    with resized(types):
        if problem := _other_numbers(first):
            return problem
    grown = {node for node, kind in types.items() if isinstance(node, TensorNode) and _differs(node, kind)}
    steps = [step for step in first.graph.steps if isinstance(step, ConvertedOp) and _may_hold(step, grown)]
    if not steps:
        return ""
    for pieces in (first, other):
        # Each op is written by itself, as if all others were there.
        pieces.prepare_writer()
        written = (node for step in pieces.graph.steps for node in step.expr.outputs)
        pieces.writer.names.update((node, node.name) for node in (*pieces.graph.inputs, *written))
    for step in steps:
        first.emit(step)
    other.writer.known = first.writer.initializers
    with resized(types):
        try:
            for step in steps:
                other.emit(step)
        except ExportError as error:
            return str(error).rstrip(".")
    return _describe(first_difference(first.writer, other.writer))


def _other_numbers(writer: OpWriter) -> str:
    """Returns which op would be read with other numbers at the present sizes; "" if none."""
    for step in writer.graph.steps:
        if isinstance(step, ConvertedOp) and step.call is not None and step.call.fixed:
            present = ops.read(step.expr)
            if present is None or present.fixed != step.call.fixed:
                return _describe(f"{step.call.kind} {step.call.out.name!r}")
    return ""


def _differs(node: TensorNode, kind: TensorType | None) -> bool:
    return kind is None or tuple(kind.shape) != tuple(node.shape or ())


def _may_hold(step: ConvertedOp, grown: set[Node]) -> bool:
    """Whether an op may be written with a size of tensors of which some have another one."""
    if step.call is None or step.call.kind in _WITHOUT_SIZES:
        return False
    return not grown.isdisjoint((*step.expr.inputs, *step.expr.outputs))


def _describe(node: str) -> str:
    return f"{node} is written for this size alone" if node else ""


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
