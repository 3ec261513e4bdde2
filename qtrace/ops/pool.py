"""Pooling."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.ops.arguments import activation, settings, traced_arguments
from qtrace.ops.base import Reading, Role, op_rule

__all__ = ["RULES"]


def _window(expr: Expr, *more: str) -> Reading:
    names = ("kernel_size", "stride", "padding")
    a = settings(expr, *names, *more)
    numbers, fixed = traced_arguments({n: a[n] for n in names})
    kernel = numbers.integers("kernel_size", 2)
    attrs: dict[str, Any] = {
        "kernel": kernel,
        "stride": kernel if numbers["stride"] is None else numbers.integers("stride", 2),
        "padding": numbers.integers("padding", 2),
    }
    if "mode" in a:
        attrs["count_include_pad"] = a["mode"] == "average"
    return Reading((activation(expr),), attrs, fixed=fixed)


def _average(expr: Expr) -> Reading:
    return _window(expr, "mode")


def _adaptive(expr: Expr) -> Reading:
    numbers, fixed = traced_arguments({"output size": settings(expr, "oshp")["oshp"]})
    return Reading((activation(expr),), {"output_size": numbers.integers("output size", 2)}, fixed=fixed)


_ADAPTIVE_MEAN = (M.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)
_ADAPTIVE_MAX = (M.AdaptiveMaxPool2d, F.adaptive_max_pool2d)

RULES = (
    op_rule("max_pool2d", Role.CARRY, _window, M.MaxPool2d, F.max_pool2d),
    op_rule("avg_pool2d", Role.ELEMENTWISE, _average, M.AvgPool2d, F.avg_pool2d),
    op_rule("adaptive_avg_pool2d", Role.ELEMENTWISE, _adaptive, *_ADAPTIVE_MEAN),
    op_rule("adaptive_max_pool2d", Role.CARRY, _adaptive, *_ADAPTIVE_MAX),
)
