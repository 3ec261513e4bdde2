"""Ops that pick values of one tensor by an index or a mask: what they pick they do not change."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.graph.walk import is_float_tensor, owner
from qtrace.ops.base import (
    OpRule,
    Reading,
    Role,
    Target,
    arguments,
    positional,
    tensors,
    traced_arguments,
    typed,
)

__all__ = ["RULES"]


def _getitem(expr: Expr) -> Reading | str:
    return typed(expr, tensors(expr.args[0]), {"index": expr.args[1]})


def _gather(expr: Expr) -> Reading | str:
    a = arguments(expr)
    return typed(expr, tensors(a["inp"]), {"axis": int(a["axis"]), "index": a["index"]})


def _indexing_one_hot(expr: Expr) -> Reading | str:
    a = arguments(expr)
    attrs = {"index": a["index"], "axis": int(a["axis"]), "keepdims": bool(a["keepdims"])}
    return typed(expr, tensors(a["src"]), attrs)


def _cond_take(expr: Expr) -> Reading | str:
    """The second output holds positions, so types are mixed where the first holds floats."""
    a = arguments(expr)
    nodes, attrs = tensors(a["x"]), {"mask": a["mask"]}
    return Reading(nodes, attrs) if all(is_float_tensor(n) for n in nodes) else typed(expr, nodes, attrs)


def _embedding(expr: Expr) -> Reading | str:
    module = owner(expr)
    table = module.weight if module is not None else arguments(expr)["weight"]
    index = tensors(positional(expr)[0])
    return Reading((), {"index": index[0], "weight": table}) if index else "its index is fixed"


def _one_hot(expr: Expr) -> Reading | str:
    a = arguments(expr)
    numbers, fixed = traced_arguments({"num_classes": a["num_classes"]})
    return Reading(tensors(a["inp"]), {"num_classes": int(numbers["num_classes"])}, fixed=fixed)


RULES = (
    OpRule("getitem", Role.CARRY, (Target(method="__getitem__"),), _getitem),
    OpRule("gather", Role.CARRY, (Target(function=F.gather),), _gather),
    OpRule("indexing_one_hot", Role.CARRY, (Target(function=F.nn.indexing_one_hot),), _indexing_one_hot),
    OpRule("cond_take", Role.CARRY, (Target(function=F.cond_take),), _cond_take),
    OpRule(
        "embedding",
        Role.FLOAT,
        (Target(module=M.Embedding), Target(function=F.nn.embedding)),
        _embedding,
        "a table that is read and not computed with",
    ),
    OpRule(
        "one_hot",
        Role.SHAPE,
        (Target(function=F.nn.one_hot),),
        _one_hot,
        "it makes integers of integers",
    ),
)
