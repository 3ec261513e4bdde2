"""Computes the numbers that a graph derives from shapes, at the traced shapes."""

from __future__ import annotations

import math
from typing import Any

import megengine as mge
import numpy as np

from qtrace.graph.types import Apply, Constant, Expr, GetAttr, Input, Node, TensorNode
from qtrace.graph.walk import reads_shape

__all__ = ["traced_value"]

_MAX_VALUES = 256  # entries of one tensor: enough for sizes, paddings and bounds
_MAX_EXPRS = 512
_ALL_AXES = 7  # the axis of a GetVarShape that reads the whole shape


def traced_value(node: TensorNode) -> np.ndarray | None:
    """Computes ``node`` from the shapes that the graph was traced with.

    Args:
        node: a node of a graph, such as ``(x.shape[2] + 31) // 32``.

    Returns:
        The value of ``node``; None if it depends on the values of an input or a parameter, or is large.
    """
    order = _collect_exprs(node)
    if order is None:
        return None
    values: dict[Node, np.ndarray] = {}
    for expr in order:
        results = _evaluate(expr, values)
        if results is None:
            return None
        for out, value in zip(expr.outputs, results, strict=True):
            values[out] = value
    return values[node]


def _collect_exprs(node: TensorNode) -> list[Expr] | None:
    """Returns the exprs that compute ``node``, in order; None if one reads more than shapes and numbers."""
    order: list[Expr] = []
    visited: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(node.expr, False)]
    while stack:
        expr, ready = stack.pop()
        if expr in visited:
            continue
        if ready:
            visited.add(expr)
            order.append(expr)
            continue
        if not _is_small(expr) or len(stack) > _MAX_EXPRS or len(order) > _MAX_EXPRS:
            return None
        stack.append((expr, True))
        if not reads_shape(expr):
            stack.extend((n.expr, False) for n in expr.inputs)
    return order


def _is_small(expr: Any) -> bool:
    """Returns whether an expr gives at most `_MAX_VALUES` numbers and reads no parameter or input."""
    if expr is None or isinstance(expr, (Input, GetAttr)) or not expr.outputs or _is_random(expr):
        return False
    if isinstance(expr, Constant) and not isinstance(expr.outputs[0], TensorNode):
        return False
    shapes = [n.shape for n in expr.outputs]
    return all(s is not None and math.prod(int(i) for i in s) <= _MAX_VALUES for s in shapes)


def _is_random(expr: Expr) -> bool:
    """Returns whether an expr draws random numbers."""
    return isinstance(expr, Apply) and "RNG" in type(expr.opdef).__name__


def _evaluate(expr: Expr, values: dict[Node, np.ndarray]) -> list[np.ndarray] | None:
    """Computes the results of ``expr``; None if its kernel refuses these sizes."""
    if reads_shape(expr):
        (source,) = expr.inputs
        shape = np.array([int(n) for n in source.shape], np.int32)
        axis = int(expr.opdef.axis)
        return [shape if axis == _ALL_AXES else shape[axis : axis + 1 or None]]
    inputs = [mge.Tensor(values[n]) for n in expr.inputs]
    try:
        return [result.numpy() for result in expr.interpret(*inputs)]
    except Exception:  # MegEngine's errors are of no class of their own
        return None
