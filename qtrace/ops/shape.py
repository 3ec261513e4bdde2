"""Shapes, and tensors that are made from numbers and shapes only: never quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F

from qtrace.graph.types import Apply, Expr
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, tensors, typed

__all__ = ["RULES"]

_MADE = "it is made from numbers and shapes"


def _shape(expr: Expr) -> Reading | str:
    return Reading(tensors(*expr.inputs))


def _made(*names: str) -> Callable[[Expr], Reading | str]:
    """A reader of a function whose arguments ``names`` are numbers, shapes or nodes of such."""

    def read(expr: Expr) -> Reading | str:
        a = arguments(expr)
        return Reading(tensors(*(a[n] for n in names)), {n: a[n] for n in names})

    return read


def _fill(expr: Expr) -> Reading | str:
    """full, ones, zeros; the kernel that a call leaves which the tracer did not see."""
    if isinstance(expr, Apply):
        value: Any = expr.opdef.value
        shape = expr.inputs[0]
    else:
        a = arguments(expr)
        value, shape = a.get("value", _VALUES.get(expr.func.__name__)), a["shape"]
    return Reading(tensors(shape, value), {"shape": shape, "value": value})


def _fill_like(expr: Expr) -> Reading | str:
    a = arguments(expr)
    value = a.get("value", _VALUES.get(expr.func.__name__))
    return Reading(tensors(a["inp"]), {"value": value})


_VALUES = {"ones": 1.0, "zeros": 0.0, "ones_like": 1.0, "zeros_like": 0.0}


def _meshgrid(expr: Expr) -> Reading | str:
    a = arguments(expr)
    return typed(expr, tensors(*a["inputs"]), {"indexing": a["indexing"]})


def _rule(kind: str, read: Callable[[Expr], Reading | str], *targets: Target) -> OpRule:
    return OpRule(kind, Role.SHAPE, targets, read, _MADE)


def _functions(*functions: Callable[..., Any]) -> tuple[Target, ...]:
    return tuple(Target(function=f) for f in functions)


RULES = (
    OpRule("shape", Role.SHAPE, (Target(kernel="GetVarShape"),), _shape, "integer or shape arithmetic"),
    _rule("arange", _made("start", "stop", "step"), *_functions(F.arange)),
    _rule("linspace", _made("start", "stop", "num"), *_functions(F.linspace)),
    _rule("eye", _made("N", "M"), *_functions(F.eye)),
    _rule("full", _fill, *_functions(F.full, F.ones, F.zeros), Target(kernel="Fill")),
    _rule("full_like", _fill_like, *_functions(F.full_like, F.ones_like, F.zeros_like)),
    OpRule(
        "meshgrid",
        Role.FLOAT,
        _functions(F.meshgrid),
        _meshgrid,
        "it makes coordinates, which need more than 8 bits",
    ),
)
