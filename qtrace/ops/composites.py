"""The functions of ``qtrace.graph.functions``, which composites in pieces become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qtrace.graph import functions
from qtrace.graph.types import Expr
from qtrace.ops.arguments import activation, arguments, tensors
from qtrace.ops.base import OpRule, Reading, Role, op_rule, typed
from qtrace.ops.elementwise import unary

__all__ = ["RULES"]


def _hard_sigmoid(expr: Expr) -> Reading:
    a = arguments(expr)
    numbers = {"slope": a.number("slope"), "offset": a.number("offset")}
    return typed(expr, (activation(expr),), numbers)


def _rms_norm(expr: Expr) -> Reading:
    a = arguments(expr)
    attrs = {"weight": a["weight"], "axis": a.integer("axis"), "eps": a.number("eps")}
    return typed(expr, (activation(expr),), attrs)


def _scale_and_shift(expr: Expr) -> Reading:
    a = arguments(expr)
    return typed(expr, (activation(expr),), {"scale": a["scale"], "shift": a["shift"]})


def _attention(expr: Expr) -> Reading:
    a = arguments(expr)
    inputs = tensors(a["query"], a["key"], a["value"], a["mask"], a["bias"])
    return typed(expr, inputs, {"scale": a.number("scale"), "mask": a["mask"], "bias": a["bias"]})


def _channel_shuffle(expr: Expr) -> Reading:
    return typed(expr, (activation(expr),), {"groups": arguments(expr).integer("groups")})


def _space_to_depth(expr: Expr) -> Reading:
    a = arguments(expr)
    reading = typed(expr, (activation(expr),), {"block": a.integer("block")})
    return replace(reading, attrs={**reading.attrs, "order": a.integers("order", 3)})


def _float(kind: str, read: Callable[[Expr], Reading], function: Callable[..., Any], reason: str) -> OpRule:
    return op_rule(kind, Role.FLOAT, read, function, reason=reason)


_ACCURATE = "it keeps its accuracy only in float between 8-bit neighbours"
_EXPANDED = "prepare writes it as products and a softmax, which are quantized"

RULES = (
    op_rule("erf", Role.FLOAT, unary, functions.erf, kernels=["ERF"], reason=_ACCURATE),
    _float("gelu_tanh", unary, functions.gelu_tanh, _ACCURATE),
    op_rule("hard_sigmoid", Role.ELEMENTWISE, _hard_sigmoid, functions.hard_sigmoid),
    op_rule("mish", Role.ELEMENTWISE, unary, functions.mish),
    _float("rms_norm", _rms_norm, functions.rms_norm, _ACCURATE),
    op_rule("scale_and_shift", Role.ELEMENTWISE, _scale_and_shift, functions.scale_and_shift),
    _float("scaled_dot_product_attention", _attention, functions.scaled_dot_product_attention, _EXPANDED),
    op_rule("channel_shuffle", Role.CARRY, _channel_shuffle, functions.channel_shuffle),
    op_rule("space_to_depth", Role.CARRY, _space_to_depth, functions.space_to_depth),
)
