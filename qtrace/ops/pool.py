"""Pooling."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.graph.walk import owner
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, positional, tensors
from qtrace.ops.conv import pair

__all__ = ["RULES"]


def _window(expr: Expr) -> Reading | str:
    module = owner(expr)
    if module is None:
        a = arguments(expr)
        node = a.pop("inp")
    else:
        node = expr.args[1]
        names = ("kernel_size", "stride", "padding", "mode")
        a = {k: getattr(module, k) for k in names if hasattr(module, k)}
    kernel = pair(a["kernel_size"])
    attrs: dict[str, Any] = {
        "kernel": kernel,
        "stride": kernel if a["stride"] is None else pair(a["stride"]),
        "padding": pair(a["padding"]),
    }
    if "mode" in a:
        attrs["count_include_pad"] = a["mode"] == "average"
    return Reading(tensors(node), attrs)


def _adaptive(expr: Expr) -> Reading | str:
    module = owner(expr)
    size = module.oshp if module is not None else arguments(expr)["oshp"]
    if tensors(size) or not isinstance(size, (int, tuple, list)):
        return "its output size is computed"
    return Reading(tensors(positional(expr)[0]), {"output_size": pair(size)})


RULES = (
    OpRule("max_pool2d", Role.CARRY, (Target(module=M.MaxPool2d), Target(function=F.max_pool2d)), _window),
    OpRule(
        "avg_pool2d", Role.ELEMENTWISE, (Target(module=M.AvgPool2d), Target(function=F.avg_pool2d)), _window
    ),
    OpRule(
        "adaptive_avg_pool2d",
        Role.ELEMENTWISE,
        (Target(module=M.AdaptiveAvgPool2d), Target(function=F.adaptive_avg_pool2d)),
        _adaptive,
    ),
    OpRule(
        "adaptive_max_pool2d",
        Role.CARRY,
        (Target(module=M.AdaptiveMaxPool2d), Target(function=F.adaptive_max_pool2d)),
        _adaptive,
    ),
)
