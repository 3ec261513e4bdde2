"""Losses, which occur where a training graph was traced."""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.ops.arguments import children
from qtrace.ops.base import Reading, Role, op_rule

__all__ = ["RULES"]


def _read(expr: Expr) -> Reading:
    return Reading(children((expr.args, expr.kwargs)))


RULES = tuple(
    op_rule(function.__name__, Role.FLOAT, _read, function, reason="a loss is computed in float")
    for function in (
        F.loss.l1_loss,
        F.loss.square_loss,
        F.loss.cross_entropy,
        F.loss.binary_cross_entropy,
        F.loss.hinge_loss,
        F.loss.ctc_loss,
    )
)
