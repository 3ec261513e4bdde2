"""Linear layers and matrix products."""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.types import Apply, CallFunction, Expr, TensorNode
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, positional, tensors, typed

__all__ = ["RULES"]


def _linear(expr: Expr) -> Reading | str:
    a = arguments(expr)
    if not isinstance(a["weight"], TensorNode) or not isinstance(a["bias"], (TensorNode, type(None))):
        return "its weight or bias is not a tensor of the graph"
    return Reading((a["inp"],), {}, a["weight"], a["bias"], (0,))


def _matmul(expr: Expr) -> Reading | str:
    left, right = positional(expr)[:2]
    flips = (False, False)
    if isinstance(expr, CallFunction):
        a = arguments(expr)
        flips = (bool(a.get("transpose_a", False)), bool(a.get("transpose_b", False)))
    elif isinstance(expr, Apply):
        flips = (bool(expr.opdef.transposeA), bool(expr.opdef.transposeB))
    elif expr.method == "__rmatmul__":
        left, right = right, left
    nodes = tensors(left, right)
    if len(nodes) != 2:
        return "an operand is not a tensor of the graph"
    return typed(expr, nodes, {"transpose_a": flips[0], "transpose_b": flips[1]})


RULES = (
    OpRule("linear", Role.COMPUTE, (Target(function=F.linear),), _linear),
    OpRule(
        "matmul",
        Role.COMPUTE,
        (
            Target(function=F.matmul),
            Target(function=F.dot),
            Target(method="__matmul__"),
            Target(method="__imatmul__"),
            Target(method="__rmatmul__"),
            Target(kernel="MatrixMul"),
            Target(kernel="BatchedMatrixMul"),
        ),
        _matmul,
    ),
)
