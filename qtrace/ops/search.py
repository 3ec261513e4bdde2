"""Sorting, searching and running sums: decided between values that 8 bits would make equal."""

from __future__ import annotations

from collections.abc import Callable

import megengine.functional as F

from qtrace.graph.types import Apply, Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.base import INTEGERS, OpRule, Reading, Role, Target, arguments, axes, tensors

__all__ = ["RULES"]


def _named(*names: str, first: str = "inp") -> Callable[[Expr], Reading | str]:
    """A reader that gives the arguments ``names`` as attributes."""

    def read(expr: Expr) -> Reading | str:
        if isinstance(expr, Apply):
            return "its arguments are those of a kernel, which are not read"
        a = arguments(expr)
        nodes = tensors(a[first])
        attrs = {n: axes(a[n]) if n == "axis" else a[n] for n in names}
        if any(is_float_tensor(n) for n in nodes):
            return Reading(nodes, attrs)
        return Reading(nodes, attrs, role=Role.SHAPE, reason=INTEGERS)

    return read


def _nms(expr: Expr) -> Reading | str:
    a = arguments(expr)
    attrs = {n: a[n] for n in ("iou_thresh", "max_output")}
    return Reading(tensors(a["boxes"], a["scores"]), attrs)


def _rule(kind: str, read: Callable[[Expr], Reading | str], reason: str, *targets: Target) -> OpRule:
    return OpRule(kind, Role.FLOAT, targets, read, reason)


_TIES = "it decides by order, and rounding makes ties"

RULES = (
    _rule(
        "topk",
        _named("k", "descending", "kth_only", "no_sort"),
        _TIES,
        Target(function=F.topk),
        Target(kernel="TopK"),
    ),
    _rule("sort", _named("descending"), _TIES, Target(function=F.sort)),
    _rule("argsort", _named("descending"), _TIES, Target(function=F.argsort), Target(kernel="Argsort")),
    _rule("argmax", _named("axis", "keepdims"), _TIES, Target(function=F.argmax), Target(kernel="Argmax")),
    _rule("argmin", _named("axis", "keepdims"), _TIES, Target(function=F.argmin), Target(kernel="Argmin")),
    _rule(
        "cumsum",
        _named("axis"),
        "its sums grow along the axis: one scale does not fit both ends",
        Target(function=F.cumsum),
        Target(kernel="Cumsum"),
    ),
    _rule("nms", _nms, _TIES, Target(function=F.vision.nms)),
)
