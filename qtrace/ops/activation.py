"""Activation functions."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.graph.walk import owner
from qtrace.ops.base import OpRule, Reading, Role, Target, positional, tensors

__all__ = ["RULES"]


def _unary(expr: Expr) -> Reading | str:
    nodes = tensors(*positional(expr))
    return Reading(nodes[-1:]) if nodes else "its input is not a tensor of the graph"


def _leaky_relu(expr: Expr) -> Reading | str:
    module = owner(expr)
    if module is not None:
        return Reading(tensors(expr.args[1]), {"negative_slope": float(module.negative_slope)})
    slope = expr.args[1] if len(expr.args) > 1 else expr.kwargs.get("negative_slope", 0.01)
    return Reading(tensors(expr.args[0]), {"negative_slope": float(slope)})


def _clip(expr: Expr) -> Reading | str:
    args = (*expr.args, None, None)
    low, high = expr.kwargs.get("lower", args[1]), expr.kwargs.get("upper", args[2])
    if tensors(low, high):
        return "its bounds are computed"
    bounds = {"lower": None if low is None else float(low), "upper": None if high is None else float(high)}
    return Reading(tensors(args[0]), bounds)


def _rule(kind: str, *targets: Target, role: Role = Role.ELEMENTWISE) -> OpRule:
    return OpRule(kind, role, targets, _unary)


RULES = (
    _rule(
        "relu", Target(module=M.ReLU), Target(function=F.relu), Target(kernel="RELU"), role=Role.ACTIVATION
    ),
    _rule("relu6", Target(function=F.relu6), Target(kernel="RELU6"), role=Role.ACTIVATION),
    OpRule("clip", Role.ACTIVATION, (Target(function=F.clip),), _clip),
    OpRule(
        "leaky_relu",
        Role.ELEMENTWISE,
        (Target(module=M.LeakyReLU), Target(function=F.leaky_relu)),
        _leaky_relu,
    ),
    _rule("sigmoid", Target(module=M.Sigmoid), Target(function=F.sigmoid), Target(kernel="SIGMOID")),
    _rule("silu", Target(module=M.SiLU), Target(function=F.silu), Target(kernel="SILU")),
    _rule("hswish", Target(function=F.hswish), Target(kernel="H_SWISH")),
    _rule("hsigmoid", Target(function=F.hsigmoid), Target(kernel="HSIGMOID")),
    _rule("tanh", Target(function=F.tanh), Target(kernel="TANH")),
)
