"""Comparisons and logic: the results are booleans, which are never quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.ops.arithmetic import binary, unary
from qtrace.ops.base import OpRule, Reading, Role, Target

__all__ = ["RULES"]


def _compared(read: Callable[[Expr], Reading | str]) -> Callable[[Expr], Reading | str]:
    """Reads like ``read``; the mixture of float32 and booleans is what the op is for."""

    def reader(expr: Expr) -> Reading | str:
        found = read(expr)
        if isinstance(found, str) or found.role is Role.SHAPE:
            return found
        return Reading(found.inputs, found.attrs)

    return reader


_BINARY, _UNARY = _compared(binary), _compared(unary)


def _comparison(kind: str, function: Callable[..., Any], method: str, kernel: str = "") -> OpRule:
    targets = [Target(function=function), Target(method=method)]
    targets += [Target(kernel=kernel)] if kernel else []
    return OpRule(kind, Role.FLOAT, tuple(targets), _BINARY, "it compares: near a tie, rounding would decide")


def _logic(kind: str, function: Callable[..., Any], kernel: str, *methods: str) -> OpRule:
    targets = (Target(function=function), Target(kernel=kernel), *(Target(method=m) for m in methods))
    read = _UNARY if kind == "logical_not" else _BINARY
    return OpRule(kind, Role.SHAPE, targets, read, "it computes on booleans or integers")


RULES = (
    _comparison("less", F.less, "__lt__", "LT"),
    _comparison("less_equal", F.less_equal, "__le__", "LEQ"),
    # Their kernels are those above with the operands exchanged.
    _comparison("greater", F.greater, "__gt__"),
    _comparison("greater_equal", F.greater_equal, "__ge__"),
    _comparison("equal", F.equal, "__eq__", "EQ"),
    _comparison("not_equal", F.not_equal, "__ne__", "NEQ"),
    OpRule(
        "isnan",
        Role.FLOAT,
        (Target(function=F.isnan), Target(kernel="ISNAN")),
        _UNARY,
        "integers are never NaN",
    ),
    OpRule(
        "isinf",
        Role.FLOAT,
        (Target(function=F.isinf), Target(kernel="ISINF")),
        _UNARY,
        "integers are never infinite",
    ),
    _logic("logical_and", F.logical_and, "AND", "__and__", "__iand__", "__rand__"),
    _logic("logical_or", F.logical_or, "OR", "__or__", "__ior__", "__ror__"),
    _logic("logical_xor", F.logical_xor, "XOR", "__xor__", "__ixor__", "__rxor__"),
    _logic("logical_not", F.logical_not, "NOT", "__invert__"),
    _logic("left_shift", F.left_shift, "SHL", "__lshift__", "__ilshift__", "__rlshift__"),
    _logic("right_shift", F.right_shift, "SHR", "__rshift__", "__irshift__", "__rrshift__"),
)
