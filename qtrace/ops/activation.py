"""Activation functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Apply, Expr, is_call_module
from qtrace.ops.arguments import activation, named, operands, settings, tensors
from qtrace.ops.arithmetic import number_or_node, unary
from qtrace.ops.base import Reading, Role, op_rule, typed

__all__ = ["RULES"]


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

RULES = (
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
