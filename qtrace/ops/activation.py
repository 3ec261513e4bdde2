"""Activation functions."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Apply, Expr
from qtrace.graph.walk import owner
from qtrace.ops.arithmetic import fixed
from qtrace.ops.base import OpRule, Reading, Role, Target, named, positional, tensors, typed

__all__ = ["RULES"]


def _unary(expr: Expr) -> Reading | str:
    nodes = tensors(positional(expr)[0])
    return typed(expr, nodes) if nodes else "its input is not a tensor of the graph"


def _leaky_relu(expr: Expr) -> Reading | str:
    module = owner(expr)
    slope = named(expr)["negative_slope"] if module is None else module.negative_slope
    return typed(expr, tensors(positional(expr)[0]), {"negative_slope": float(slope)})


def _prelu(expr: Expr) -> Reading | str:
    module, operands = owner(expr), positional(expr)
    return typed(expr, tensors(operands[0]), {"slope": operands[1] if module is None else module.weight})


def _clip(expr: Expr) -> Reading | str:
    if isinstance(expr, Apply):
        x, lower, upper = expr.inputs
    else:
        a = named(expr)
        x, lower, upper = a["x"], a["lower"], a["upper"]
    bounds = {"lower": _bound(lower), "upper": _bound(upper)}
    found = typed(expr, tensors(x), bounds)
    if found.role is None and tensors(*bounds.values()):
        return Reading(found.inputs, bounds, role=Role.FLOAT, reason="its bounds are computed")
    return found


def _bound(value: Any) -> Any:
    """A number, None, or the node that computes it."""
    found = None if value is None else fixed(value)
    return float(found) if isinstance(found, (int, float)) else found


def _rule(kind: str, *targets: Target, role: Role = Role.ELEMENTWISE, reason: str = "") -> OpRule:
    return OpRule(kind, role, targets, _unary, reason)


_LOGARITHM = "it takes a logarithm, whose small differences 8 bits lose"

RULES = (
    _rule(
        "relu", Target(module=M.ReLU), Target(function=F.relu), Target(kernel="RELU"), role=Role.ACTIVATION
    ),
    _rule("relu6", Target(function=F.relu6), Target(kernel="RELU6"), role=Role.ACTIVATION),
    OpRule("clip", Role.ACTIVATION, (Target(function=F.clip), Target(kernel="CLIP")), _clip),
    OpRule(
        "leaky_relu",
        Role.ELEMENTWISE,
        (Target(module=M.LeakyReLU), Target(function=F.leaky_relu)),
        _leaky_relu,
    ),
    OpRule(
        "prelu",
        Role.ELEMENTWISE,
        (Target(module=M.PReLU), Target(function=F.nn.prelu), Target(kernel="PRELU")),
        _prelu,
    ),
    _rule("sigmoid", Target(module=M.Sigmoid), Target(function=F.sigmoid), Target(kernel="SIGMOID")),
    _rule("silu", Target(module=M.SiLU), Target(function=F.silu), Target(kernel="SILU")),
    _rule("hswish", Target(function=F.hswish), Target(kernel="H_SWISH")),
    _rule("hsigmoid", Target(function=F.hsigmoid), Target(kernel="HSIGMOID")),
    _rule("tanh", Target(function=F.tanh), Target(kernel="TANH")),
    _rule(
        "gelu",
        Target(module=M.GELU),
        Target(function=F.gelu),
        Target(kernel="GELU"),
        role=Role.FLOAT,
        reason="it keeps its accuracy only in float between 8-bit neighbours",
    ),
    _rule(
        "softplus",
        Target(function=F.softplus),
        Target(kernel="SOFTPLUS"),
        role=Role.FLOAT,
        reason=_LOGARITHM,
    ),
    _rule(
        "logsigmoid",
        Target(function=F.logsigmoid),
        Target(kernel="LOGSIGMOID"),
        role=Role.FLOAT,
        reason=_LOGARITHM,
    ),
)
