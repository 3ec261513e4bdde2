"""Linear layers and matrix products."""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.types import Expr, TensorNode
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, tensors

__all__ = ["RULES"]


def _linear(expr: Expr) -> Reading | str:
    a = arguments(expr)
    if not isinstance(a["weight"], TensorNode):
        return "its weight is not a tensor of the graph"
    return Reading((a["inp"],), {}, a["weight"], a["bias"], (0,))


def _matmul(expr: Expr) -> Reading | str:
    if hasattr(expr, "func"):
        a = arguments(expr)
        left, right = a["inp1"], a["inp2"]
        attrs = {"transpose_a": bool(a["transpose_a"]), "transpose_b": bool(a["transpose_b"])}
    else:
        left, right = expr.args[:2]
        attrs = {"transpose_a": False, "transpose_b": False}
    nodes = tensors(left, right)
    return Reading(nodes, attrs) if len(nodes) == 2 else "an operand is not a tensor of the graph"


RULES = (
    OpRule("linear", Role.COMPUTE, (Target(function=F.linear),), _linear),
    OpRule("matmul", Role.COMPUTE, (Target(function=F.matmul), Target(method="__matmul__")), _matmul),
)
