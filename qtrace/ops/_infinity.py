"""Finds infinity in a graph, such as a mask adds to scores that a softmax shall ignore."""

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

_CREATING_KINDS = ("full", "full_like")
_PASSING_KINDS = ("add", "neg", "sub")  # besides ops of a passing role
_PASSING_ROLES = (Role.CARRY, Role.CONCAT)


def meets_infinity(
    expr: Expr, rule: OpRule, reading: Reading, rule_of: Callable[[Expr], OpRule | None]
) -> bool:
    """Returns whether ``expr`` writes infinity as a number, or reads a tensor that has it from constants.

    Args:
        expr: any expr of a flat graph.
        rule: the rule of ``expr``.
        reading: the reading of ``expr`` by ``rule``.
        rule_of: finds the rule of any other expr.
    """
    if not _passes(rule):
        return False
    if _writes_infinity(expr):
        return True
    stack: list[TensorNode] = list(reading.inputs)
    visited: set[Node] = set()
    while stack:
        source = stack.pop().expr
        if source in visited or isinstance(source, Input):
            continue
        visited.add(source)
        if isinstance(source, (Constant, GetAttr)):
            if _contains_infinity(source):
                return True
            continue
        source_rule = rule_of(source)
        if source_rule is not None and (_passes(source_rule) or source_rule.kind in _CREATING_KINDS):
            if _writes_infinity(source):
                return True
            stack.extend(n for n in source.inputs if isinstance(n, TensorNode))
    return False


def _passes(rule: OpRule) -> bool:
    return rule.role in _PASSING_ROLES or rule.kind in _PASSING_KINDS


def _writes_infinity(expr: Expr) -> bool:
    """Returns whether an argument of ``expr`` is the number infinity."""
    if isinstance(expr, Apply):
        values: tuple[Any, ...] = (getattr(expr.opdef, "value", None),)
    else:
        values = (*expr.args, *expr.kwargs.values())
    return any(isinstance(value, float) and math.isinf(value) for value in values)


def _contains_infinity(expr: Constant | GetAttr) -> bool:
    """Returns whether a constant or buffer contains infinity; parameters are not searched."""
    value: Any = expr.value if isinstance(expr, Constant) else get_module(expr.inputs[0].owner, expr.name)
    if not isinstance(value, Tensor) or isinstance(value, Parameter) or np.dtype(value.dtype).kind != "f":
        return False
    return bool(np.isinf(value.numpy()).any())
