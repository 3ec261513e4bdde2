"""Conversions between types."""

from __future__ import annotations

from qtrace.graph.types import Apply, Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.base import INTEGERS, OpRule, Reading, Role, Target, positional, tensors

__all__ = ["RULES"]


def _astype(expr: Expr) -> Reading | str:
    nodes, out = tensors(positional(expr)[0]), expr.outputs[0]
    if not isinstance(expr, Apply) and tensors(*expr.args[1:]):
        return "its type is taken from a tensor"
    floats = (is_float_tensor(nodes[0]), is_float_tensor(out))
    if all(floats):
        return Reading(nodes)
    if not any(floats):
        return Reading(nodes, role=Role.SHAPE, reason=INTEGERS)
    return Reading(nodes, role=Role.FLOAT, reason="it converts between float32 and another type")


RULES = (OpRule("astype", Role.CARRY, (Target(method="astype"), Target(kernel="TypeCvt")), _astype),)
