"""Ops that pick values of one tensor by an index or a mask and do not change them."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.arguments import UnreadableError, arguments, operands, settings, tensors, traced_arguments
from qtrace.ops.base import Reading, Role, op_rule, typed

__all__ = ["RULES"]


def _getitem(expr: Expr) -> Reading:
    node, index = operands(expr, 2)
    return typed(expr, tensors(node), {"index": index})


def _gather(expr: Expr) -> Reading:
    a = arguments(expr)
    return typed(expr, tensors(a["inp"]), {"axis": a.integer("axis"), "index": a["index"]})


def _indexing_one_hot(expr: Expr) -> Reading:
    a = arguments(expr)
    attrs = {"index": a["index"], "axis": a.integer("axis"), "keepdims": a.flag("keepdims")}
    return typed(expr, tensors(a["src"]), attrs)


def _cond_take(expr: Expr) -> Reading:
    """Reads ``cond_take``, whose second output holds integer positions of the picked floats."""
    a = arguments(expr)
    nodes, attrs = tensors(a["x"]), {"mask": a["mask"]}
    return Reading(nodes, attrs) if all(is_float_tensor(n) for n in nodes) else typed(expr, nodes, attrs)


def _embedding(expr: Expr) -> Reading:
    index = tensors(*operands(expr, 1))
    if not index:
        raise UnreadableError("its index is fixed")
    return Reading((), {"index": index[0], "weight": settings(expr, "weight")["weight"]})


def _one_hot(expr: Expr) -> Reading:
    a = arguments(expr)
    numbers, fixed = traced_arguments({"num_classes": a["num_classes"]})
    return Reading(tensors(a["inp"]), {"num_classes": numbers.integer("num_classes")}, fixed=fixed)


_TABLE = "a table that is read and not computed with"

RULES = (
    op_rule("getitem", Role.CARRY, _getitem, methods=["__getitem__"]),
    op_rule("gather", Role.CARRY, _gather, F.gather),
    op_rule("indexing_one_hot", Role.CARRY, _indexing_one_hot, F.nn.indexing_one_hot),
    op_rule("cond_take", Role.CARRY, _cond_take, F.cond_take),
    op_rule("embedding", Role.FLOAT, _embedding, M.Embedding, F.nn.embedding, reason=_TABLE),
    op_rule("one_hot", Role.SHAPE, _one_hot, F.nn.one_hot, reason="it makes integers of integers"),
)
