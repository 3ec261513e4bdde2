"""Reductions over axes. The largest and the smallest value are values of the input: those only move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.ops.base import OpRule, Reading, Role, Target, axes, named, tensors, typed

__all__ = ["RULES"]


def _reduction(expr: Expr) -> Reading | str:
    a = named(expr)
    nodes = tensors(a["inp"])
    attrs = {"axis": axes(a["axis"]), "keepdims": bool(a["keepdims"])}
    return typed(expr, nodes, attrs) if nodes else "its input is not a tensor of the graph"


def _rule(kind: str, role: Role, function: Callable[..., Any], method: str = "", reason: str = "") -> OpRule:
    targets = (Target(function=function), *((Target(method=method),) if method else ()))
    return OpRule(kind, role, targets, _reduction, reason)


_SPREAD = "it squares differences, whose range 8 bits do not hold"

RULES = (
    _rule("mean", Role.ELEMENTWISE, F.mean, "mean"),
    _rule("sum", Role.ELEMENTWISE, F.sum, "sum"),
    _rule("max", Role.CARRY, F.max, "max"),
    _rule("min", Role.CARRY, F.min, "min"),
    _rule("prod", Role.FLOAT, F.prod, "prod", "products of many values span orders of magnitude"),
    _rule("var", Role.FLOAT, F.var, "var", _SPREAD),
    _rule("std", Role.FLOAT, F.std, "", _SPREAD),
)
