"""Sorting, searching and running sums: their results depend on differences that 8 bits would lose."""

from __future__ import annotations

from collections.abc import Callable

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.arguments import arguments, tensors
from qtrace.ops.base import INTEGERS, Reading, Role, op_rule

__all__ = ["RULES"]


def _named(*names: str) -> Callable[[Expr], Reading]:
    """Builds a reader that gives the arguments ``names`` as attributes."""

    def read(expr: Expr) -> Reading:
        a = arguments(expr)
        nodes = tensors(a["inp"])
        attrs = {n: a.axes(n) if n == "axis" else a[n] for n in names}
        if any(is_float_tensor(n) for n in nodes):
            return Reading(nodes, attrs)
        return Reading(nodes, attrs, role=Role.SHAPE, reason=INTEGERS)

    return read


def _nms(expr: Expr) -> Reading:
    a = arguments(expr)
    return Reading(tensors(a["boxes"], a["scores"]), {n: a[n] for n in ("iou_thresh", "max_output")})


_TIES = "it decides by order, and rounding makes ties"
_GROWS = "its sums grow along the axis: one scale does not fit both ends"
_TOPK = _named("k", "descending", "kth_only", "no_sort")
_ORDER, _EXTREME = _named("descending"), _named("axis", "keepdims")

RULES = (
    op_rule("topk", Role.FLOAT, _TOPK, F.topk, kernels=["TopK"], reason=_TIES),
    op_rule("sort", Role.FLOAT, _ORDER, F.sort, reason=_TIES),
    op_rule("argsort", Role.FLOAT, _ORDER, F.argsort, kernels=["Argsort"], reason=_TIES),
    op_rule("argmax", Role.FLOAT, _EXTREME, F.argmax, kernels=["Argmax"], reason=_TIES),
    op_rule("argmin", Role.FLOAT, _EXTREME, F.argmin, kernels=["Argmin"], reason=_TIES),
    op_rule("cumsum", Role.FLOAT, _named("axis"), F.cumsum, kernels=["Cumsum"], reason=_GROWS),
    op_rule("nms", Role.FLOAT, _nms, F.vision.nms, reason=_TIES),
)
