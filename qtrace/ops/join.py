"""Ops that join values of several tensors in one."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Apply, Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.arguments import Arguments, UnreadableError, arguments, operands, tensors
from qtrace.ops.base import Reading, Role, op_rule, typed

__all__ = ["RULES"]


def _join(expr: Expr) -> Reading:
    if isinstance(expr, Apply):
        a = Arguments(inps=tuple(expr.inputs), axis=expr.opdef.axis)
    else:
        a = arguments(expr)
    if not isinstance(a["inps"], (tuple, list)):
        raise UnreadableError("it joins the parts of one tensor, where its rule reads a list of tensors")
    parts = tuple(a["inps"])
    nodes = tensors(*parts)
    if len(nodes) < len(parts) and any(is_float_tensor(n) for n in nodes):
        raise UnreadableError("one of the tensors that it joins is not a tensor of the graph")
    return typed(expr, nodes, {"axis": a.integer("axis"), "parts": parts})


def _setitem(expr: Expr) -> Reading:
    """Reads ``x[index] = value``, whose output is the changed tensor that later readers read."""
    target, index, value = operands(expr, 3)
    return typed(expr, tensors(target, value), {"index": index, "value": value})


def _read_where(expr: Expr) -> Reading:
    mask, x, y = operands(expr, 3)
    return typed(expr, tensors(x, y), {"mask": mask, "operands": (x, y)})


def _scatter(expr: Expr) -> Reading:
    a = arguments(expr)
    return typed(expr, tensors(a["inp"], a["source"]), {"axis": a.integer("axis"), "index": a["index"]})


RULES = (
    op_rule("concat", Role.CONCAT, _join, M.Concat, F.concat, kernels=["Concat"]),
    op_rule("stack", Role.CONCAT, _join, F.stack, kernels=["Stack"]),
    op_rule("setitem", Role.CONCAT, _setitem, methods=["__setitem__"]),
    op_rule("where", Role.CONCAT, _read_where, F.where, kernels=["Where"]),
    op_rule("scatter", Role.CONCAT, _scatter, F.scatter),
)
