"""Ops that compute each value from the values at its place: arithmetic, activations and other functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np

from qtrace.graph.types import Apply, CallMethod, Constant, Expr, TensorNode, is_call_module
from qtrace.ops.arguments import (
    UnreadableError,
    activation,
    named,
    operands,
    positional,
    settings,
    tensors,
    unreadable,
)
from qtrace.ops.base import OpRule, Reading, Role, op_rule, typed

__all__ = ["RULES", "binary", "number_or_node", "unary"]


# Arithmetic on one or two tensors: functions, operators, reversed and in-place operators, kernels.


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

_ARITHMETIC = (
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


# Activation functions.


def _leaky_relu(expr: Expr) -> Reading:
    slope = settings(expr, "negative_slope").number("negative_slope")
    return typed(expr, (activation(expr),), {"negative_slope": slope})


def _prelu(expr: Expr) -> Reading:
    slope = settings(expr, "weight")["weight"] if is_call_module(expr) else operands(expr, 2)[1]
    return typed(expr, (activation(expr),), {"slope": slope})


def _clip(expr: Expr) -> Reading:
    if isinstance(expr, Apply):
        x, lower, upper = operands(expr, 3)
    else:
        a = named(expr)
        x, lower, upper = a["x"], a["lower"], a["upper"]
    bounds = {"lower": _bound(lower), "upper": _bound(upper)}
    reading = typed(expr, tensors(x), bounds)
    if reading.role is None and tensors(*bounds.values()):
        return replace(reading, role=Role.FLOAT, reason="its bounds are computed")
    return reading


def _bound(value: Any) -> Any:
    """Reads a bound: a number, None, or the node that computes it."""
    bound = None if value is None else number_or_node(value)
    return float(bound) if isinstance(bound, (int, float)) else bound


_LOGARITHM = "it takes a logarithm, whose small differences 8 bits lose"
_ACCURATE = "it keeps its accuracy only in float between 8-bit neighbours"

_ACTIVATION = (
    op_rule("relu", Role.ACTIVATION, unary, M.ReLU, F.relu, kernels=["RELU"]),
    op_rule("relu6", Role.ACTIVATION, unary, F.relu6, kernels=["RELU6"]),
    op_rule("clip", Role.ACTIVATION, _clip, F.clip, kernels=["CLIP"]),
    op_rule("leaky_relu", Role.ELEMENTWISE, _leaky_relu, M.LeakyReLU, F.leaky_relu),
    op_rule("prelu", Role.ELEMENTWISE, _prelu, M.PReLU, F.nn.prelu, kernels=["PRELU"]),
    op_rule("sigmoid", Role.ELEMENTWISE, unary, M.Sigmoid, F.sigmoid, kernels=["SIGMOID"]),
    op_rule("silu", Role.ELEMENTWISE, unary, M.SiLU, F.silu, kernels=["SILU"]),
    op_rule("hswish", Role.ELEMENTWISE, unary, F.hswish, kernels=["H_SWISH"]),
    op_rule("hsigmoid", Role.ELEMENTWISE, unary, F.hsigmoid, kernels=["HSIGMOID"]),
    op_rule("tanh", Role.ELEMENTWISE, unary, F.tanh, kernels=["TANH"]),
    op_rule("gelu", Role.FLOAT, unary, M.GELU, F.gelu, kernels=["GELU"], reason=_ACCURATE),
    op_rule("softplus", Role.FLOAT, unary, F.softplus, kernels=["SOFTPLUS"], reason=_LOGARITHM),
    op_rule("logsigmoid", Role.FLOAT, unary, F.logsigmoid, kernels=["LOGSIGMOID"], reason=_LOGARITHM),
)


# Functions of one number that stay in float: roots, logarithms, rounding, trigonometry.

_WIDE = "its output spans orders of magnitude"
_DEEP = "its input spans orders of magnitude"
_STEEP = "it is steep near the end of its range, where one step of 8 bits is much"
_PERIODIC = "it is periodic: the position in a period needs more than 8 bits"


def _rule(kind: str, function: Callable[..., Any], kernel: str, reason: str, *methods: str) -> OpRule:
    kernels = [kernel] if kernel else []
    return op_rule(kind, Role.FLOAT, unary, function, methods=methods, kernels=kernels, reason=reason)


_POINTWISE = (
    _rule("exp", F.exp, "EXP", _WIDE),
    _rule("expm1", F.expm1, "EXPM1", _WIDE),
    _rule("log", F.log, "LOG", _DEEP),
    _rule("log1p", F.log1p, "LOG1P", _DEEP),
    _rule("sqrt", F.sqrt, "SQRT", "it is steep near zero, where one step of 8 bits is much"),
    _rule("floor", F.floor, "FLOOR", _ROUNDS, "__floor__"),
    _rule("ceil", F.ceil, "CEIL", _ROUNDS, "__ceil__"),
    _rule("round", F.round, "ROUND", _ROUNDS, "__round__"),
    _rule("sign", F.sign, "SIGN", "it is decided at zero, which rounding moves"),
    _rule("sin", F.sin, "SIN", _PERIODIC),
    _rule("cos", F.cos, "COS", _PERIODIC),
    _rule("tan", F.tan, "TAN", _PERIODIC),
    _rule("asin", F.asin, "ASIN", _STEEP),
    _rule("acos", F.acos, "", _STEEP),
    _rule("atan", F.atan, "", _STEEP),
    _rule("sinh", F.sinh, "", _WIDE),
    _rule("cosh", F.cosh, "", _WIDE),
    _rule("asinh", F.asinh, "", _DEEP),
    _rule("acosh", F.acosh, "", _DEEP),
    _rule("atanh", F.atanh, "", _STEEP),
    op_rule("atan2", Role.FLOAT, binary, F.atan2, reason=_PERIODIC),
    op_rule("logaddexp", Role.FLOAT, binary, F.logaddexp, reason=_DEEP),
)

RULES = (*_ARITHMETIC, *_ACTIVATION, *_POINTWISE)
