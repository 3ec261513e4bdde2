"""Ops that put several tensors into one."""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.types import Expr, TensorNode
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments

__all__ = ["RULES"]


def _join(expr: Expr) -> Reading | str:
    a = arguments(expr)
    parts = tuple(a["inps"])
    if not all(isinstance(p, TensorNode) and is_float_tensor(p) for p in parts):
        return "integer or shape arithmetic"
    return Reading(parts, {"axis": int(a["axis"])})


RULES = (
    OpRule("concat", Role.CONCAT, (Target(function=F.concat),), _join),
    OpRule("stack", Role.CONCAT, (Target(function=F.stack),), _join),
)
