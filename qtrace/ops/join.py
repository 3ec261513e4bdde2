"""Ops that put values of several tensors into one."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Apply, Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, positional, tensors, typed

__all__ = ["RULES"]


def _join(expr: Expr) -> Reading | str:
    if isinstance(expr, Apply):
        parts, axis = tuple(expr.inputs), expr.opdef.axis
    else:
        a = arguments(expr)
        parts, axis = tuple(a["inps"]), a["axis"]
    nodes = tensors(*parts)
    attrs = {"axis": int(axis), "parts": parts}
    if len(nodes) < len(parts) and any(is_float_tensor(n) for n in nodes):
        return "one of the tensors that it joins is not a tensor of the graph"
    return typed(expr, nodes, attrs)


def _setitem(expr: Expr) -> Reading | str:
    """``x[index] = value``; the graph's node for it is the changed tensor, and later readers read that."""
    target, index, value = expr.args
    return typed(expr, tensors(target, value), {"index": index, "value": value})


def _where(expr: Expr) -> Reading | str:
    mask, x, y = positional(expr)
    return typed(expr, tensors(x, y), {"mask": mask, "operands": (x, y)})


def _scatter(expr: Expr) -> Reading | str:
    a = arguments(expr)
    return typed(expr, tensors(a["inp"], a["source"]), {"axis": int(a["axis"]), "index": a["index"]})


RULES = (
    OpRule(
        "concat",
        Role.CONCAT,
        (Target(module=M.Concat), Target(function=F.concat), Target(kernel="Concat")),
        _join,
    ),
    OpRule("stack", Role.CONCAT, (Target(function=F.stack), Target(kernel="Stack")), _join),
    OpRule("setitem", Role.CONCAT, (Target(method="__setitem__"),), _setitem),
    OpRule("where", Role.CONCAT, (Target(function=F.where), Target(kernel="Where")), _where),
    OpRule("scatter", Role.CONCAT, (Target(function=F.scatter),), _scatter),
)
