"""Reductions over axes. ``max`` and ``min`` only move values of the input."""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.ops.arguments import named
from qtrace.ops.base import Reading, Role, op_rule, typed

__all__ = ["RULES"]


def _reduction(expr: Expr) -> Reading:
    a = named(expr)
    return typed(expr, (a.tensor(),), {"axis": a.axes("axis"), "keepdims": a.flag("keepdims")})


_PRODUCTS = "products of many values span orders of magnitude"
_SPREAD = "it squares differences, whose range 8 bits do not hold"

RULES = (
    op_rule("mean", Role.ELEMENTWISE, _reduction, F.mean, methods=["mean"]),
    op_rule("sum", Role.ELEMENTWISE, _reduction, F.sum, methods=["sum"]),
    op_rule("max", Role.CARRY, _reduction, F.max, methods=["max"]),
    op_rule("min", Role.CARRY, _reduction, F.min, methods=["min"]),
    op_rule("prod", Role.FLOAT, _reduction, F.prod, methods=["prod"], reason=_PRODUCTS),
    op_rule("var", Role.FLOAT, _reduction, F.var, methods=["var"], reason=_SPREAD),
    op_rule("std", Role.FLOAT, _reduction, F.std, reason=_SPREAD),
)
