"""Roundings by the range of each batch, which `prepare` puts before layers with method: dynamic."""

from __future__ import annotations

from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph.types import Expr
from qtrace.ops.base import Reading, Role, op_rule

__all__ = ["RULES"]


def _read(expr: Expr) -> Reading:
    return Reading((expr.inputs[1],))


RULES = (
    op_rule(
        "dynamic_quantize", Role.FLOAT, _read, DynamicQuant, reason="it rounds by the range of each batch"
    ),
)
