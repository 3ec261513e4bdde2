"""Convolutions. Their modules are expanded to these functions before quantization (`passes.expand`)."""

from __future__ import annotations

from typing import Any

import megengine.functional as F

from qtrace.graph.types import Expr, TensorNode
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments

__all__ = ["RULES"]


def pair(value: Any) -> tuple[int, int]:
    """An int or a pair of ints as a pair."""
    if isinstance(value, (tuple, list)):
        first, second = value
        return int(first), int(second)
    return int(value), int(value)


def _conv2d(expr: Expr) -> Reading | str:
    a = arguments(expr)
    weight = a["weight"]
    if not isinstance(weight, TensorNode):
        return "its weight is not a tensor of the graph"
    if a["conv_mode"] != "cross_correlation":
        return f"conv_mode {a['conv_mode']!r} is not supported"
    attrs = {
        "stride": pair(a["stride"]),
        "padding": pair(a["padding"]),
        "dilation": pair(a["dilation"]),
        "groups": int(a["groups"]),
    }
    # A grouped weight is (groups, out / groups, in / groups, kh, kw).
    axes = (0,) if attrs["groups"] == 1 else (0, 1)
    return Reading((a["inp"],), attrs, weight, a["bias"], axes)


def _conv_transpose2d(expr: Expr) -> Reading | str:
    a = arguments(expr)
    weight = a["weight"]
    if not isinstance(weight, TensorNode):
        return "its weight is not a tensor of the graph"
    attrs = {
        "stride": pair(a["stride"]),
        "padding": pair(a["padding"]),
        "output_padding": pair(a["output_padding"]),
        "dilation": pair(a["dilation"]),
        "groups": int(a["groups"]),
    }
    # (in, out, kh, kw), grouped: (groups, in / groups, out / groups, kh, kw).
    axes = (1,) if attrs["groups"] == 1 else (0, 2)
    return Reading((a["inp"],), attrs, weight, a["bias"], axes)


RULES = (
    OpRule("conv2d", Role.COMPUTE, (Target(function=F.conv2d),), _conv2d),
    OpRule("conv_transpose2d", Role.COMPUTE, (Target(function=F.conv_transpose2d),), _conv_transpose2d),
)
