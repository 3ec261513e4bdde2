"""Arithmetic on one or two tensors: functions, operators, reversed and in-place operators, kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np

from qtrace.graph.types import CallMethod, Constant, Expr, TensorNode
from qtrace.ops.arguments import (
    UnreadableError,
    activation,
    operands,
    positional,
    settings,
    tensors,
    unreadable,
)
from qtrace.ops.base import Reading, Role, op_rule, typed

__all__ = ["RULES", "binary", "number_or_node", "unary"]


def unary(expr: Expr) -> Reading:
    """Reads an op of one tensor."""
    return typed(expr, (activation(expr),))


def binary(expr: Expr) -> Reading:
    """Reads an op of two operands; a number becomes ``scalar``, and ``side`` says which operand it is."""
    left, right = (number_or_node(v) for v in operands(expr, 2))
    if isinstance(expr, CallMethod) and expr.method.startswith("__r") and expr.method != "__rshift__":
        left, right = right, left
    attrs: dict[str, Any] = {"operands": (left, right)}
    for side, value in (("left", left), ("right", right)):
        if isinstance(value, (bool, int, float)):
            attrs.update(scalar=float(value), side=side)
    return typed(expr, tensors(left, right), attrs)


def division(expr: Expr) -> Reading:
    """Reads a division; a division by a tensor stays float."""
    reading = binary(expr)
    if reading.role is not None or reading.attrs.get("side") == "right":
        return reading
    return dataclasses.replace(reading, role=Role.FLOAT, reason="a small denominator would round to zero")


def number_or_node(value: Any) -> Any:
    """Reads an operand: a node, a Python number, or an array of numbers.

    Raises:
        UnreadableError: when the operand is none of these.
    """
    if isinstance(value, TensorNode):
        # A function that the tracer did not see leaves its numbers as constants of the graph.
        scalar = isinstance(value.expr, Constant) and value.shape == ()
        return value.expr.value.numpy().item() if scalar else value
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise unreadable("operand", value, "a number")
    return array.item() if array.ndim == 0 else array


def _elemwise(expr: Expr) -> Reading:
    """Reads MegEngine's quantizable Elemwise: `expand` writes its other modes as functions beforehand."""
    mode = str(settings(expr, "method")["method"]).upper()
    if mode not in ("FUSE_ADD_SIGMOID", "FUSE_ADD_TANH"):
        raise UnreadableError(f"its mode {mode} lacks a rule")
    return typed(expr, tensors(*positional(expr)), {"mode": mode})


def _operators(name: str) -> tuple[str, ...]:
    return f"__{name}__", f"__i{name}__", f"__r{name}__"


_POWER = "its output spans a power of its input's range"
_ROUNDS = "it rounds: an error of one step changes a whole value"
_WRAPS = "it wraps around: an error of one step can change the whole range"

RULES = (
    op_rule("add", Role.ELEMENTWISE, binary, F.add, methods=_operators("add"), kernels=["ADD"]),
    op_rule("sub", Role.ELEMENTWISE, binary, F.sub, methods=_operators("sub"), kernels=["SUB"]),
    op_rule("mul", Role.ELEMENTWISE, binary, F.mul, methods=_operators("mul"), kernels=["MUL"]),
    op_rule("div", Role.ELEMENTWISE, division, F.div, methods=_operators("truediv"), kernels=["TRUE_DIV"]),
    op_rule("maximum", Role.ELEMENTWISE, binary, F.maximum, kernels=["MAX"]),
    op_rule("minimum", Role.ELEMENTWISE, binary, F.minimum, kernels=["MIN"]),
    op_rule("neg", Role.ELEMENTWISE, unary, F.neg, methods=["__neg__"], kernels=["NEGATE"]),
    op_rule("abs", Role.ELEMENTWISE, unary, F.abs, methods=["__abs__"], kernels=["ABS"]),
    op_rule("elemwise", Role.ELEMENTWISE, _elemwise, M.Elemwise),
    op_rule("pow", Role.FLOAT, binary, F.pow, methods=_operators("pow"), kernels=["POW"], reason=_POWER),
    op_rule("square", Role.FLOAT, unary, F.square, kernels=["SQUARE"], reason=_POWER),
    op_rule(
        "floor_div",
        Role.FLOAT,
        binary,
        F.floor_div,
        methods=_operators("floordiv"),
        kernels=["FLOOR_DIV"],
        reason=_ROUNDS,
    ),
    op_rule("mod", Role.FLOAT, binary, F.mod, methods=_operators("mod"), kernels=["MOD"], reason=_WRAPS),
)
