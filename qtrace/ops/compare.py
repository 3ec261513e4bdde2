"""Comparisons and logic: the results are booleans, which are never quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.ops.arithmetic import binary, unary
from qtrace.ops.base import OpRule, Reading, Role, op_rule

__all__ = ["RULES"]


def _allow_mixed(read: Callable[[Expr], Reading]) -> Callable[[Expr], Reading]:
    """Wraps ``read`` for ops that mix float32 and booleans on purpose: the role is the rule's."""

    def reader(expr: Expr) -> Reading:
        reading = read(expr)
        return reading if reading.role is Role.SHAPE else Reading(reading.inputs, reading.attrs)

    return reader


_BINARY, _UNARY = _allow_mixed(binary), _allow_mixed(unary)


def _comparison(kind: str, function: Callable[..., Any], method: str, *kernels: str) -> OpRule:
    reason = "it compares: near a tie, rounding would decide"
    return op_rule(kind, Role.FLOAT, _BINARY, function, methods=[method], kernels=kernels, reason=reason)


def _logic(kind: str, function: Callable[..., Any], kernel: str, *methods: str) -> OpRule:
    read = _UNARY if kind == "logical_not" else _BINARY
    reason = "it computes on booleans or integers"
    return op_rule(kind, Role.SHAPE, read, function, methods=methods, kernels=[kernel], reason=reason)


RULES = (
    _comparison("less", F.less, "__lt__", "LT"),
    _comparison("less_equal", F.less_equal, "__le__", "LEQ"),
    # Their kernels are LT and LEQ with the operands exchanged.
    _comparison("greater", F.greater, "__gt__"),
    _comparison("greater_equal", F.greater_equal, "__ge__"),
    _comparison("equal", F.equal, "__eq__", "EQ"),
    _comparison("not_equal", F.not_equal, "__ne__", "NEQ"),
    op_rule("isnan", Role.FLOAT, _UNARY, F.isnan, kernels=["ISNAN"], reason="integers are never NaN"),
    op_rule("isinf", Role.FLOAT, _UNARY, F.isinf, kernels=["ISINF"], reason="integers are never infinite"),
    _logic("logical_and", F.logical_and, "AND", "__and__", "__iand__", "__rand__"),
    _logic("logical_or", F.logical_or, "OR", "__or__", "__ior__", "__ror__"),
    _logic("logical_xor", F.logical_xor, "XOR", "__xor__", "__ixor__", "__rxor__"),
    _logic("logical_not", F.logical_not, "NOT", "__invert__"),
    _logic("left_shift", F.left_shift, "SHL", "__lshift__", "__ilshift__", "__rlshift__"),
    _logic("right_shift", F.right_shift, "SHR", "__rshift__", "__irshift__", "__rrshift__"),
)
