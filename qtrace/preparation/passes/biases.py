"""Gives every layer a bias with one number per channel.

MegEngine adds a bias of one number to all channels, and ``bias[...] = 0`` leaves a parameter of one number.
Integer kernels and files take one number per channel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import megengine.functional as F

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.graph.walk import exprs, users
from qtrace.ops import OpCall
from qtrace.preparation.passes.base import PassResult

__all__ = ["broadcast_biases"]


def broadcast_biases(traced: TracedModule, before_norms: bool = True) -> PassResult:
    """Broadcasts biases of one number to the channels of their layers; the parameters stay as they are.

    Args:
        traced: a flat, expanded graph; it is edited in place.
        before_norms: False skips the layers that a BatchNorm follows, whose bias ``fuse_bn`` writes.
    """
    changed = []
    with GraphEditor(traced) as editor:
        for call, bias, shape in list(_single_biases(traced)):
            if not before_norms and any(
                (reader := ops.read(user)) is not None and reader.kind == "batch_norm"
                for user in users(call.out)
            ):
                continue
            new = editor.call_function(F.broadcast_to, bias, shape, after=bias.expr, like=bias)
            new.shape = shape
            editor.set_argument(call.expr, "bias", new)
            changed.append(
                f"{call.out.name}: its bias of one number broadcast to {math.prod(shape)} channels"
            )
    return PassResult(tuple(changed))


def _single_biases(traced: TracedModule) -> Iterator[tuple[OpCall, TensorNode, tuple[int, ...]]]:
    """Yields each layer with a bias of one number, that bias, and the shape to broadcast it to."""
    for expr in exprs(traced):
        call = ops.read(expr)
        if call is None or call.weight is None or call.bias is None:
            continue
        out, linear = tuple(int(n) for n in call.out.shape or ()), call.kind == "linear"
        size = math.prod(int(n) for n in call.bias.shape)
        if len(out) < 2 or size != 1 or (channels := out[-1] if linear else out[1]) == 1:
            continue
        yield call, call.bias, (channels,) if linear else (1, channels, *[1] * (len(out) - 2))
