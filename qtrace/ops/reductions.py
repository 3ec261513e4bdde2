"""Reductions over axes, sorting, searching, running sums and comparisons."""

from __future__ import annotations

from collections.abc import Callable

import megengine.functional as F

from qtrace.graph.types import Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.arguments import arguments, named, tensors
from qtrace.ops.base import INTEGERS, Reading, Role, op_rule, typed
from qtrace.ops.elementwise import binary, unary

# Reductions over axes. ``max`` and ``min`` only move values of the input.


def _reduction(expr: Expr) -> Reading:
    a = named(expr)
    return typed(expr, (a.tensor(),), {"axis": a.axes("axis"), "keepdims": a.flag("keepdims")})


_PRODUCTS = "products of many values span orders of magnitude"
_SPREAD = "it squares differences, whose range 8 bits do not hold"

_REDUCE = (
    op_rule("mean", Role.ELEMENTWISE, _reduction, F.mean),
    op_rule("sum", Role.ELEMENTWISE, _reduction, F.sum),
    op_rule("max", Role.CARRY, _reduction, F.max),
    op_rule("min", Role.CARRY, _reduction, F.min),
    op_rule("prod", Role.FLOAT, _reduction, F.prod, reason=_PRODUCTS),
    op_rule("var", Role.FLOAT, _reduction, F.var, reason=_SPREAD),
    op_rule("std", Role.FLOAT, _reduction, F.std, reason=_SPREAD),
)


# Sorting, searching and running sums: their results depend on differences that 8 bits would lose.


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

_SEARCH = (
    op_rule("topk", Role.FLOAT, _TOPK, F.topk, kernels=["TopK"], reason=_TIES),
    op_rule("sort", Role.FLOAT, _ORDER, F.sort, reason=_TIES),
    op_rule("argsort", Role.FLOAT, _ORDER, F.argsort, kernels=["Argsort"], reason=_TIES),
    op_rule("argmax", Role.FLOAT, _EXTREME, F.argmax, kernels=["Argmax"], reason=_TIES),
    op_rule("argmin", Role.FLOAT, _EXTREME, F.argmin, kernels=["Argmin"], reason=_TIES),
    op_rule("cumsum", Role.FLOAT, _named("axis"), F.cumsum, kernels=["Cumsum"], reason=_GROWS),
    op_rule("nms", Role.FLOAT, _nms, F.vision.nms, reason=_TIES),
)


# Comparisons and logic: the results are booleans, which are never quantized.


def _allow_mixed(read: Callable[[Expr], Reading]) -> Callable[[Expr], Reading]:
    """Wraps ``read`` for ops that mix float32 and booleans on purpose: the role is the rule's."""

    def reader(expr: Expr) -> Reading:
        reading = read(expr)
        return reading if reading.role is Role.SHAPE else Reading(reading.inputs, reading.attrs)

    return reader


_BINARY, _UNARY = _allow_mixed(binary), _allow_mixed(unary)


_TIE = "it compares: near a tie, rounding would decide"
_BOOLEANS = "it computes on booleans or integers"
_COMPARISONS = (F.less, F.less_equal, F.greater, F.greater_equal, F.equal, F.not_equal)
_LOGIC = (F.logical_and, F.logical_or, F.logical_xor, F.left_shift, F.right_shift)
_COMPARE = (
    *(op_rule(f.__name__, Role.FLOAT, _BINARY, f, reason=_TIE) for f in _COMPARISONS),
    op_rule("isnan", Role.FLOAT, _UNARY, F.isnan, reason="integers are never NaN"),
    op_rule("isinf", Role.FLOAT, _UNARY, F.isinf, reason="integers are never infinite"),
    *(op_rule(f.__name__, Role.SHAPE, _BINARY, f, reason=_BOOLEANS) for f in _LOGIC),
    op_rule("logical_not", Role.SHAPE, _UNARY, F.logical_not, reason=_BOOLEANS),
)

RULES = (*_REDUCE, *_SEARCH, *_COMPARE)
