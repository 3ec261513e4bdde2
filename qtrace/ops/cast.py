"""Conversions between types."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qtrace.graph.types import Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.arguments import activation
from qtrace.ops.base import INTEGERS, Reading, Role, op_rule, typed

__all__ = ["RULES"]


def _astype(expr: Expr) -> Reading:
    node, out = activation(expr), expr.outputs[0]
    if np.dtype(node.dtype) == np.dtype(out.dtype):
        return replace(typed(expr, (node,)), kind="identity")
    if not is_float_tensor(node) and not is_float_tensor(out):
        return Reading((node,), role=Role.SHAPE, reason=INTEGERS)
    return Reading((node,), role=Role.FLOAT, reason="it converts between float32 and another type")


RULES = (op_rule("astype", Role.CARRY, _astype, methods=["astype"], kernels=["TypeCvt"]),)
