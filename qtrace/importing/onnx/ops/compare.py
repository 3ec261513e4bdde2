"""Comparisons, logic, and choices between tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.graph.types import CallFunction, TensorNode
from qtrace.importing.onnx.call import Call, Lowering

__all__ = ["LOWERINGS"]


def _comparison(function: Callable[..., Any]) -> Lowering:
    def lower(call: Call) -> Any:
        if call.dtype(0).kind == "u" and call.dtype(0).itemsize > 2:
            call.refuse(f"compares {call.dtype(0).name}, which MegEngine lacks")
        left, right = call.operand(0), call.operand(1)
        if function is F.equal and right == -math.inf and _is_largest(left):
            return _all_minus_infinity(call, left)
        return call.function(function, call.tensor(0) if isinstance(left, float) else left, right)

    return lower


def _is_largest(node: Any) -> bool:
    return isinstance(node, TensorNode) and isinstance(node.expr, CallFunction) and node.expr.func is F.max


def _all_minus_infinity(call: Call, largest: TensorNode) -> Any:
    """Computes whether the largest value is minus infinity, for which `F.max` gives the smallest float."""
    source, *options = largest.expr.args
    return call.function(F.min, call.function(F.equal, source, -math.inf), *options)


def _logic(function: Callable[..., Any]) -> Lowering:
    def lower(call: Call) -> Any:
        return call.function(function, *(call.tensor(i) for i in range(len(call.values))))

    return lower


def _where(call: Call) -> Any:
    if call.dtype(1) == np.bool_:
        condition = call.tensor(0)
        chosen = call.function(F.logical_and, condition, call.tensor(1))
        other = call.function(F.logical_and, call.function(F.logical_not, condition), call.tensor(2))
        return call.function(F.logical_or, chosen, other)
    condition, x, y = (call.tensor(i) for i in range(3))
    sizes, shapes = call.common_sizes(condition, x, y)
    return call.function(F.where, *(call.expanded(node, sizes, shapes) for node in (condition, x, y)))


def _is_nan(call: Call) -> Any:
    return call.function(F.isnan, call.tensor(0))


def _is_inf(call: Call) -> Any:
    negative, positive = call.attribute("detect_negative", 1), call.attribute("detect_positive", 1)
    if negative and positive:
        return call.function(F.isinf, call.tensor(0))
    if not negative and not positive:
        call.refuse("detects infinity of neither sign")
    return call.function(F.equal, call.tensor(0), math.inf if positive else -math.inf)


LOWERINGS: dict[str, Lowering] = {
    "Equal": _comparison(F.equal),
    "Greater": _comparison(F.greater),
    "GreaterOrEqual": _comparison(F.greater_equal),
    "Less": _comparison(F.less),
    "LessOrEqual": _comparison(F.less_equal),
    "And": _logic(F.logical_and),
    "Or": _logic(F.logical_or),
    "Xor": _logic(F.logical_xor),
    "Not": _logic(F.logical_not),
    "Where": _where,
    "IsNaN": _is_nan,
    "IsInf": _is_inf,
}
