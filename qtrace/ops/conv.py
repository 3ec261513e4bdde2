"""Convolutions. Their modules are expanded to these functions before quantization (`passes.expand`)."""

from __future__ import annotations

from collections.abc import Callable

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.graph.walk import owner
from qtrace.ops.arguments import UnreadableError, arguments, positional, tensors, traced_arguments
from qtrace.ops.base import Reading, Role, op_rule
from qtrace.ops.linear import weight_and_bias

__all__ = ["RULES"]


def _conv(rank: int, transposed: bool = False) -> Callable[[Expr], Reading]:
    def read(expr: Expr) -> Reading:
        a = arguments(expr)
        weight, bias = weight_and_bias(a)
        if a.get("conv_mode", "cross_correlation") != "cross_correlation":
            raise UnreadableError(f"conv_mode {a['conv_mode']!r} is not supported")
        names = ("stride", "padding", "dilation", *(("output_padding",) if transposed else ()))
        numbers, fixed = traced_arguments({n: a[n] for n in (*names, "groups")})
        attrs = {**{n: numbers.integers(n, rank) for n in names}, "groups": numbers.integer("groups")}
        # A grouped weight has the groups as its first axis: (groups, out / groups, in / groups, ...), or
        # (groups, in / groups, out / groups, ...) if transposed.
        single, grouped = ((1,), (0, 2)) if transposed else ((0,), (0, 1))
        channels = grouped if len(weight.shape) == rank + 3 else single
        return Reading((a.tensor(),), attrs, weight, bias, channels, fixed=fixed)

    return read


def _float(expr: Expr) -> Reading:
    """Reads a module or function whose first operand is the activation."""
    nodes = tensors(*positional(expr))
    module = owner(expr)
    names = ("weight", "bias", "stride", "padding", "dilation", "groups")
    configured = arguments(expr) if module is None else {n: getattr(module, n, None) for n in names}
    return Reading(nodes[:1], {**{n: configured.get(n) for n in names}, "operands": nodes})


_SAMPLES = "it samples between pixels at offsets that 8 bits would round"
_PLACES = "no runtime has integer kernels for a weight of its own at every place"
_REGIONS = "no runtime has integer kernels for regions"

RULES = (
    op_rule("conv1d", Role.COMPUTE, _conv(1), F.nn.conv1d),
    op_rule("conv2d", Role.COMPUTE, _conv(2), F.conv2d),
    op_rule("conv3d", Role.COMPUTE, _conv(3), F.nn.conv3d),
    op_rule("conv_transpose2d", Role.COMPUTE, _conv(2, True), F.conv_transpose2d),
    op_rule("conv_transpose3d", Role.COMPUTE, _conv(3, True), F.nn.conv_transpose3d),
    op_rule(
        "deformable_conv2d",
        Role.FLOAT,
        _float,
        M.DeformableConv2d,
        F.nn.deformable_conv2d,
        reason=_SAMPLES,
    ),
    op_rule("local_conv2d", Role.FLOAT, _float, M.LocalConv2d, F.nn.local_conv2d, reason=_PLACES),
    op_rule(
        "region_restricted_conv",
        Role.FLOAT,
        _float,
        M.RegionRestrictedConv,
        F.nn.region_restricted_conv,
        reason=_REGIONS,
    ),
)
