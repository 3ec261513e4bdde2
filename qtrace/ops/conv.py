"""Convolutions. Their modules are expanded to these functions before quantization (`passes.expand`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr, TensorNode
from qtrace.graph.walk import owner
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, positional, tensors

__all__ = ["RULES", "pair", "several"]


def several(value: Any, count: int) -> tuple[int, ...]:
    """An int or ``count`` ints as a tuple of ``count`` ints."""
    if isinstance(value, (tuple, list)):
        if len(value) != count:
            raise ValueError(f"{value!r} has not {count} numbers")
        return tuple(int(v) for v in value)
    return (int(value),) * count


def pair(value: Any) -> tuple[int, int]:
    """An int or a pair of ints as a pair."""
    first, second = several(value, 2)
    return first, second


def _conv(rank: int, transposed: bool = False) -> Callable[[Expr], Reading | str]:
    def read(expr: Expr) -> Reading | str:
        a = arguments(expr)
        weight, bias = a["weight"], a["bias"]
        if not isinstance(weight, TensorNode) or not isinstance(bias, (TensorNode, type(None))):
            return "its weight or bias is not a tensor of the graph"
        if a.get("conv_mode", "cross_correlation") != "cross_correlation":
            return f"conv_mode {a['conv_mode']!r} is not supported"
        names = ("stride", "padding", "dilation", *(("output_padding",) if transposed else ()))
        attrs: dict[str, Any] = {n: several(a[n], rank) for n in names}
        attrs["groups"] = int(a["groups"])
        # A grouped weight has the groups in front: (groups, out / groups, in / groups, ...), transposed
        # (groups, in / groups, out / groups, ...).
        single, grouped = ((1,), (0, 2)) if transposed else ((0,), (0, 1))
        channels = grouped if len(weight.shape) == rank + 3 else single
        return Reading((a["inp"],), attrs, weight, bias, channels)

    return read


def _float(expr: Expr) -> Reading | str:
    """Reads a module or function whose first operand is the activation."""
    nodes = tensors(*positional(expr))
    module = owner(expr)
    names = ("weight", "bias", "stride", "padding", "dilation", "groups")
    found = arguments(expr) if module is None else {n: getattr(module, n, None) for n in names}
    return Reading(nodes[:1], {**{n: found.get(n) for n in names}, "operands": nodes})


def _kept(kind: str, reason: str, *targets: Target) -> OpRule:
    return OpRule(kind, Role.FLOAT, targets, _float, reason)


RULES = (
    OpRule("conv1d", Role.COMPUTE, (Target(function=F.nn.conv1d),), _conv(1)),
    OpRule("conv2d", Role.COMPUTE, (Target(function=F.conv2d),), _conv(2)),
    OpRule("conv3d", Role.COMPUTE, (Target(function=F.nn.conv3d),), _conv(3)),
    OpRule("conv_transpose2d", Role.COMPUTE, (Target(function=F.conv_transpose2d),), _conv(2, True)),
    OpRule("conv_transpose3d", Role.COMPUTE, (Target(function=F.nn.conv_transpose3d),), _conv(3, True)),
    _kept(
        "deformable_conv2d",
        "it samples between pixels at offsets that 8 bits would round",
        Target(module=M.DeformableConv2d),
        Target(function=F.nn.deformable_conv2d),
    ),
    _kept(
        "local_conv2d",
        "no runtime has integer kernels for a weight of its own at every place",
        Target(module=M.LocalConv2d),
        Target(function=F.nn.local_conv2d),
    ),
    _kept(
        "region_restricted_conv",
        "no runtime has integer kernels for regions",
        Target(module=M.RegionRestrictedConv),
        Target(function=F.nn.region_restricted_conv),
    ),
)
