"""ONNX for sizes that a graph computes from shapes: int64 from Shape on, with one node for each operation."""

from __future__ import annotations

from typing import Any

from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.types import CallMethod, TensorNode
from qtrace.graph.walk import reads_shape

__all__ = ["size_vector"]

_ALL_AXES = 7  # the axis of a GetVarShape that reads the whole shape
_OPERATORS = {"__mul__": "Mul", "__add__": "Add", "__sub__": "Sub"}
_MAX_DEPTH = 16


def size_vector(w: OnnxWriter, value: TensorNode) -> str | None:
    """Writes an integer that a graph computes from shapes as an int64 vector of length 1.

    Args:
        w: the writer.
        value: a node without axes.

    Returns:
        The vector; None if the node is no axis of a shape, nor a product, sum or difference of such.
    """
    return _vector(w, value, _MAX_DEPTH) if tuple(value.shape or ()) == () else None


def _vector(w: OnnxWriter, value: Any, depth: int) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return w.ints([value])
    expr = getattr(value, "expr", None)
    if not isinstance(expr, CallMethod) or expr.kwargs or not depth:
        return None
    known = w.size_vectors.get(value)
    if known is not None:
        return known
    vector = None
    if expr.method == "__getitem__":
        vector = _axis(w, *expr.args)
    elif expr.method in _OPERATORS and len(expr.args) == 2:
        parts = [_vector(w, part, depth - 1) for part in expr.args]
        if all(part is not None for part in parts):
            inputs = [part for part in parts if part is not None]
            vector = w.node(_OPERATORS[expr.method], inputs, w.fresh(value.name))
    if vector is not None:
        w.size_vectors[value] = vector
    return vector


def _axis(w: OnnxWriter, shape: Any, axis: Any) -> str | None:
    """Writes the size of an axis of a tensor whose whole shape is read."""
    expr: Any = getattr(shape, "expr", None)
    if type(axis) is not int or expr is None or not reads_shape(expr) or int(expr.opdef.axis) != _ALL_AXES:
        return None
    node = expr.inputs[0]
    if node not in w.names and w.value(node) is None:  # the tensor is not part of what is written
        return None
    source = w.rounded_to.get(node) or w.name(node)  # a second reader of floats would keep kernels apart
    if source not in w.shape_vectors:
        w.shape_vectors[source] = w.node("Shape", [source], w.fresh(shape.name))
    return w.node("Gather", [w.shape_vectors[source], w.ints([axis])], w.fresh(shape.name), axis=0)
