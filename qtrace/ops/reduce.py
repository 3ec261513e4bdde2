"""Reductions to a mean."""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, method_arguments, tensors

__all__ = ["RULES"]


def _mean(expr: Expr) -> Reading | str:
    a = arguments(expr) if hasattr(expr, "func") else method_arguments(expr)
    nodes = tensors(a.get("inp", a.get("self")))
    if not nodes or not is_float_tensor(nodes[0]):
        return "integer or shape arithmetic"
    axis = a["axis"]
    axes = (
        None if axis is None else tuple(int(i) for i in (axis if isinstance(axis, (tuple, list)) else [axis]))
    )
    return Reading(nodes, {"axis": axes, "keepdims": bool(a["keepdims"])})


RULES = (OpRule("mean", Role.ELEMENTWISE, (Target(function=F.mean), Target(method="mean")), _mean),)
