"""Gives every layer a bias with one number per channel, as integer kernels and files take it.

MegEngine adds a bias of one number to all channels, and ``bias[...] = 0`` leaves a parameter of one number.
It also adds a bias of any other shape, such as one for each place of a map or for each sample: that is an op
of its own in every runtime.
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

__all__ = ["align_biases"]


def align_biases(traced: TracedModule, before_norms: bool = True) -> PassResult:
    """Broadcasts biases of one number to the channels of their layers, and adds other shapes after them.

    The parameters stay as they are.

    Args:
        traced: a flat, expanded graph; it is edited in place.
        before_norms: False leaves a bias of one number to ``fuse_bn`` where a BatchNorm follows the layer.
    """
    changed = []
    with GraphEditor(traced) as editor:
        for call, bias in list(_unaligned_biases(traced)):
            shape = _bias_shape(call)
            if math.prod(bias.shape) == 1 and len(bias.shape) <= len(call.inputs[0].shape):
                if not before_norms and any(
                    (reader := ops.read(user)) is not None and reader.kind == "batch_norm"
                    for user in users(call.out)
                ):
                    continue
                shape = (1,) * (len(bias.shape) - len(shape)) + shape
                new = editor.call_function(F.broadcast_to, bias, shape, after=bias.expr, like=bias)
                new.shape = shape
                editor.set_argument(call.expr, "bias", new)
                changed.append(
                    f"{call.out.name}: its bias of one number broadcast to {math.prod(shape)} channels"
                )
                continue
            name = call.out.name
            total = editor.call_function(F.add, call.out, bias, after=call.expr, like=call.out)
            editor.set_argument(call.expr, "bias", None)
            editor.put_in_place(total, call.out)
            changed.append(f"{name}: its bias of shape {tuple(bias.shape)} is a sum of its own")
    return PassResult(tuple(changed))


def _unaligned_biases(traced: TracedModule) -> Iterator[tuple[OpCall, TensorNode]]:
    """Yields each layer whose bias lacks a number for each channel along their axis, and that bias."""
    for expr in exprs(traced):
        call = ops.read(expr)
        if call is None or call.weight is None or call.bias is None or len(call.out.shape or ()) < 2:
            continue
        if call.inputs[0].shape is None or call.bias.shape is None:  # later stages name what has no shape
            continue
        own, shape = tuple(int(n) for n in call.bias.shape), _bias_shape(call)
        rank = len(call.inputs[0].shape)
        padded = (1,) * (rank - len(own)) + own
        if padded != (1,) * (rank - len(shape)) + shape:
            yield call, call.bias


def _bias_shape(call: OpCall) -> tuple[int, ...]:
    """Returns the shape of a bias with one number for each channel of a layer."""
    assert call.weight is not None
    channels = math.prod(int(call.weight.shape[axis]) for axis in call.channel_axes)
    return (channels,) if call.kind == "linear" else (1, channels, *[1] * (len(call.inputs[0].shape) - 2))
