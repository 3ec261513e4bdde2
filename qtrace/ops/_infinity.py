"""Infinity in a graph: what a mask adds to scores that a softmax shall leave out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from megengine import Parameter, Tensor

from qtrace.graph.types import Apply, Constant, Expr, GetAttr, Input, Node, TensorNode
from qtrace.graph.walk import get_module
from qtrace.ops.base import OpRule, Reading, Role

__all__ = ["INFINITE", "meets_infinity"]

INFINITE = "it reads or writes infinity, for which no integer stands"

_MAKES = ("full", "full_like")
_PASSES = ("add", "neg", "sub")  # besides what carries or joins values
_PASSING_ROLES = (Role.CARRY, Role.CONCAT)


def meets_infinity(
    expr: Expr, rule: OpRule, reading: Reading, rule_of: Callable[[Expr], OpRule | None]
) -> bool:
    """Whether ``expr`` writes infinity as a number, or reads a tensor that holds it by its constants.

    Args:
        expr: any expr of a flat graph.
        rule: its rule.
        reading: how it was read.
        rule_of: the rule of any other expr.
    """
    if not _passes(rule):
        return False
    if _writes_infinity(expr):
        return True
    todo: list[TensorNode] = list(reading.inputs)
    seen: set[Node] = set()
    while todo:
        source = todo.pop().expr
        if source in seen or isinstance(source, Input):
            continue
        seen.add(source)
        if isinstance(source, (Constant, GetAttr)):
            if _holds(source):
                return True
            continue
        before = rule_of(source)
        if before is not None and (_passes(before) or before.kind in _MAKES):
            if _writes_infinity(source):
                return True
            todo.extend(n for n in source.inputs if isinstance(n, TensorNode))
    return False


def _passes(rule: OpRule) -> bool:
    return rule.role in _PASSING_ROLES or rule.kind in _PASSES


def _writes_infinity(expr: Expr) -> bool:
    """Whether one of the arguments is the number itself."""
    if isinstance(expr, Apply):
        given: tuple[Any, ...] = (getattr(expr.opdef, "value", None),)
    else:
        given = (*expr.args, *expr.kwargs.values())
    return any(isinstance(value, float) and math.isinf(value) for value in given)


def _holds(expr: Constant | GetAttr) -> bool:
    """Whether a constant or buffer holds infinity; parameters are not searched."""
    value: Any = expr.value if isinstance(expr, Constant) else get_module(expr.inputs[0].owner, expr.name)
    if not isinstance(value, Tensor) or isinstance(value, Parameter) or np.dtype(value.dtype).kind != "f":
        return False
    return bool(np.isinf(value.numpy()).any())
