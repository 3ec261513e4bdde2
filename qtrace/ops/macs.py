"""Counts the multiply-accumulates of an op."""

from __future__ import annotations

import math

from qtrace.ops.base import OpCall

__all__ = ["UNCOUNTED", "count_macs"]

_CONVS = ("conv1d", "conv2d", "conv3d", "linear")
_TRANSPOSED = ("conv_transpose2d", "conv_transpose3d")
# Kinds that multiply and accumulate, for which `count_macs` has no formula.
UNCOUNTED = (
    *("correlation", "deformable_conv2d", "local_conv2d", "region_restricted_conv", "lstm", "rnn"),
    *("multi_head_attention", "scaled_dot_product_attention"),
)


def count_macs(call: OpCall) -> int:
    """Counts the multiply-accumulates of `call` at its traced shapes: those of layers and matrix products."""
    if call.out.shape is None:
        return 0
    out = math.prod(int(n) for n in call.out.shape)
    if call.weight is not None and call.kind in (*_CONVS, *_TRANSPOSED):
        weight = math.prod(int(n) for n in call.weight.shape)
        if call.kind in _TRANSPOSED:
            values, channels = math.prod(int(n) for n in call.inputs[0].shape), int(call.inputs[0].shape[1])
        else:
            values, channels = out, math.prod(int(call.weight.shape[a]) for a in call.channel_axes)
        return values * weight // max(channels, 1)
    if call.kind == "matmul" and call.inputs[0].shape:
        axis = -2 if call.attrs.get("transpose_a") else -1
        return out * int(call.inputs[0].shape[axis])
    return 0
