"""Pooling."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.graph.walk import owner
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, positional, tensors, traced_arguments
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
    numbers, fixed = traced_arguments({n: a[n] for n in ("kernel_size", "stride", "padding")})
    kernel, stride = pair(numbers["kernel_size"]), numbers["stride"]
    attrs: dict[str, Any] = {
        "kernel": kernel,
        "stride": kernel if stride is None else pair(stride),
        "padding": pair(numbers["padding"]),
    }
    if "mode" in a:
        attrs["count_include_pad"] = a["mode"] == "average"
    return Reading(tensors(node), attrs, fixed=fixed)


def _adaptive(expr: Expr) -> Reading | str:
    module = owner(expr)
    size = module.oshp if module is not None else arguments(expr)["oshp"]
    numbers, fixed = traced_arguments({"output size": size})
    return Reading(tensors(positional(expr)[0]), {"output_size": pair(numbers["output size"])}, fixed=fixed)


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
