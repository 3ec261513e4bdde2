"""Conversions between types."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qtrace.graph.types import Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.base import INTEGERS, OpRule, Reading, Role, Target, positional, tensors, typed

__all__ = ["RULES"]


def _astype(expr: Expr) -> Reading | str:
    nodes, out = tensors(positional(expr)[0]), expr.outputs[0]
    if np.dtype(nodes[0].dtype) == np.dtype(out.dtype):
        return replace(typed(expr, nodes), kind="identity")
    floats = (is_float_tensor(nodes[0]), is_float_tensor(out))
    if not any(floats):
        return Reading(nodes, role=Role.SHAPE, reason=INTEGERS)
    return Reading(nodes, role=Role.FLOAT, reason="it converts between float32 and another type")


RULES = (OpRule("astype", Role.CARRY, (Target(method="astype"), Target(kernel="TypeCvt")), _astype),)
