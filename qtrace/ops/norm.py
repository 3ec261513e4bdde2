"""Normalisation. BatchNorm is folded into the layer before it, or fused with it; others stay float."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.graph.walk import owner
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, positional, tensors

__all__ = ["RULES"]


def _batch_norm(expr: Expr) -> Reading | str:
    module = owner(expr)
    if module is not None:
        if module.running_mean is None:
            return "it normalises by the statistics of each batch"
        return Reading(tensors(expr.args[1]), {"eps": float(module.eps)})
    a = arguments(expr)
    if a["running_mean"] is None or a["training"]:
        return "it normalises by the statistics of each batch"
    names = ("running_mean", "running_var", "weight", "bias")
    return Reading(tensors(a["inp"]), {"eps": float(a["eps"]), **{n: a[n] for n in names}})


def _float(expr: Expr) -> Reading | str:
    return Reading(tensors(*positional(expr))[:1])


_WHY = "it keeps its accuracy only in float between 8-bit neighbours"

RULES = (
    OpRule(
        "batch_norm",
        Role.NORM,
        (Target(module=M.BatchNorm2d), Target(module=M.BatchNorm1d), Target(function=F.nn.batch_norm)),
        _batch_norm,
    ),
    OpRule("softmax", Role.FLOAT, (Target(module=M.Softmax), Target(function=F.softmax)), _float, _WHY),
    OpRule(
        "layer_norm", Role.FLOAT, (Target(module=M.LayerNorm), Target(function=F.nn.layer_norm)), _float, _WHY
    ),
    OpRule("group_norm", Role.FLOAT, (Target(module=M.GroupNorm),), _float, _WHY),
    OpRule(
        "gelu",
        Role.FLOAT,
        (Target(module=M.GELU), Target(function=F.gelu), Target(kernel="GELU")),
        _float,
        _WHY,
    ),
    OpRule(
        "exp",
        Role.FLOAT,
        (Target(function=F.exp), Target(kernel="EXP")),
        _float,
        "its output spans orders of magnitude",
    ),
    OpRule(
        "log",
        Role.FLOAT,
        (Target(function=F.log), Target(kernel="LOG")),
        _float,
        "its input spans orders of magnitude",
    ),
)
