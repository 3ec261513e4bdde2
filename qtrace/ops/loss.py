"""Losses, which occur where a training graph was traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.ops.base import OpRule, Reading, Role, Target, children

__all__ = ["RULES"]


def _read(expr: Expr) -> Reading | str:
    return Reading(children((expr.args, expr.kwargs)))


def _rule(function: Callable[..., Any]) -> OpRule:
    name = function.__name__
    return OpRule(name, Role.FLOAT, (Target(function=function),), _read, "a loss is computed in float")


RULES = tuple(
    _rule(f)
    for f in (
        F.loss.l1_loss,
        F.loss.square_loss,
        F.loss.cross_entropy,
        F.loss.binary_cross_entropy,
        F.loss.hinge_loss,
        F.loss.ctc_loss,
    )
)
