"""Ops that compute each value from the values at its place: arithmetic, activations and other functions."""

from __future__ import annotations

import dataclasses
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
from qtrace.ops.base import Reading, Role, op_rule, typed

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


_POWER = "its output spans a power of its input's range"
_ROUNDS = "it rounds: an error of one step changes a whole value"
_WRAPS = "it wraps around: an error of one step can change the whole range"

_ARITHMETIC = (
    op_rule("add", Role.ELEMENTWISE, binary, F.add),
    op_rule("sub", Role.ELEMENTWISE, binary, F.sub),
    op_rule("mul", Role.ELEMENTWISE, binary, F.mul),
    op_rule("div", Role.ELEMENTWISE, division, F.div),
    op_rule("maximum", Role.ELEMENTWISE, binary, F.maximum),
    op_rule("minimum", Role.ELEMENTWISE, binary, F.minimum),
    op_rule("neg", Role.ELEMENTWISE, unary, F.neg),
    op_rule("abs", Role.ELEMENTWISE, unary, F.abs),
    op_rule("elemwise", Role.ELEMENTWISE, _elemwise, M.Elemwise),
    op_rule("pow", Role.FLOAT, binary, F.pow, reason=_POWER),
    op_rule("square", Role.FLOAT, unary, F.square, reason=_POWER),
    op_rule("floor_div", Role.FLOAT, binary, F.floor_div, reason=_ROUNDS),
    op_rule("mod", Role.FLOAT, binary, F.mod, reason=_WRAPS),
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
    op_rule("relu", Role.ACTIVATION, unary, M.ReLU, F.relu),
    op_rule("relu6", Role.ACTIVATION, unary, F.relu6),
    op_rule("clip", Role.ACTIVATION, _clip, F.clip),
    op_rule("leaky_relu", Role.ELEMENTWISE, _leaky_relu, M.LeakyReLU, F.leaky_relu),
    op_rule("prelu", Role.ELEMENTWISE, _prelu, M.PReLU, F.nn.prelu),
    op_rule("sigmoid", Role.ELEMENTWISE, unary, M.Sigmoid, F.sigmoid),
    op_rule("silu", Role.ELEMENTWISE, unary, M.SiLU, F.silu),
    op_rule("hswish", Role.ELEMENTWISE, unary, F.hswish),
    op_rule("hsigmoid", Role.ELEMENTWISE, unary, F.hsigmoid),
    op_rule("tanh", Role.ELEMENTWISE, unary, F.tanh),
    op_rule("gelu", Role.FLOAT, unary, M.GELU, F.gelu, reason=_ACCURATE),
    op_rule("softplus", Role.FLOAT, unary, F.softplus, reason=_LOGARITHM),
    op_rule("logsigmoid", Role.FLOAT, unary, F.logsigmoid, reason=_LOGARITHM),
)


# Functions of one number that stay in float: roots, logarithms, rounding, trigonometry.

_WIDE = "its output spans orders of magnitude"
_DEEP = "its input spans orders of magnitude"
_STEEP = "it is steep near the end of its range, where one step of 8 bits is much"
_PERIODIC = "it is periodic: the position in a period needs more than 8 bits"


_OF_ONE_NUMBER = {
    _WIDE: (F.exp, F.expm1, F.sinh, F.cosh),
    _DEEP: (F.log, F.log1p, F.asinh, F.acosh),
    _STEEP: (F.asin, F.acos, F.atan, F.atanh),
    _PERIODIC: (F.sin, F.cos, F.tan),
    _ROUNDS: (F.floor, F.ceil, F.round),
    "it is steep near zero, where one step of 8 bits is much": (F.sqrt,),
    "it is decided at zero, which rounding moves": (F.sign,),
}
_POINTWISE = (
    *(
        op_rule(function.__name__, Role.FLOAT, unary, function, reason=reason)
        for reason, functions in _OF_ONE_NUMBER.items()
        for function in functions
    ),
    op_rule("atan2", Role.FLOAT, binary, F.atan2, reason=_PERIODIC),
    op_rule("logaddexp", Role.FLOAT, binary, F.logaddexp, reason=_DEEP),
)

RULES = (*_ARITHMETIC, *_ACTIVATION, *_POINTWISE)
