"""Counts the multiply-accumulates of an op."""

from __future__ import annotations

import math
from typing import Any

from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.walk import owner
from qtrace.ops.base import OpCall

__all__ = ["count_macs", "is_uncounted"]

_CONVS = ("conv1d", "conv2d", "conv3d", "linear")
_TRANSPOSED = ("conv_transpose2d", "conv_transpose3d")
# Kinds that multiply and accumulate, for which `count_macs` lacks a formula.
UNCOUNTED = (
    *("correlation", "deformable_conv2d", "local_conv2d", "region_restricted_conv"),
    *("multi_head_attention", "scaled_dot_product_attention"),
)
_RECURRENT = ("LSTM", "GRU", "RNN")
# Kinds of nodes of a file that multiply and accumulate, kept without a formula.
_UNCOUNTED_NODES = {
    *("Attention", "MultiHeadAttention", "GroupQueryAttention", "Conv", "ConvTranspose", "ConvInteger"),
    *("FusedConv", "DeformConv", "MatMul", "MatMulInteger", "MatMulNBits", "FusedMatMul", "Gemm"),
    *("Einsum", "If", "Loop", "Scan", "LSTM", "GRU", "RNN", "DynamicQuantizeLSTM", "DFT", "STFT"),
}


def count_macs(call: OpCall) -> int:
    """Counts the multiply-accumulates of `call` at its traced shapes: of layers and matrix products."""
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
    if call.kind in ("lstm", "gru", "rnn"):  # steps and samples; a cell has only samples
        return math.prod(int(n) for n in call.inputs[0].shape[:-1]) * int(call.attrs["multiplied"])
    return _count_recurrent(call) if call.kind == "opaque" else 0


def is_uncounted(call: OpCall) -> bool:
    """Returns whether an op multiplies and accumulates in a way for which `count_macs` lacks a formula."""
    if call.kind != "opaque":
        return call.kind in UNCOUNTED
    return not count_macs(call) and any(node.op_type in _UNCOUNTED_NODES for node in _nodes(call))


def _count_recurrent(call: OpCall) -> int:
    """Counts the recurrent layers of an opaque node: each step reads both weight matrices once."""
    op = owner(call.expr)
    assert isinstance(op, OpaqueOp)
    graph, total = op.fragment.model.graph, 0
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    shapes = {value.name: node.shape for value, node in zip(graph.input, call.inputs, strict=True)}
    for node in graph.node:
        shape = shapes.get(node.input[0]) if node.op_type in _RECURRENT else None
        if shape is not None:  # steps, samples, values; or samples, steps, values
            steps = int(shape[0]) * int(shape[1])
            total += steps * sum(sizes.get(name, 0) for name in node.input[1:3])
    return total


def _nodes(call: OpCall) -> list[Any]:
    op = owner(call.expr)
    assert isinstance(op, OpaqueOp)
    return list(op.fragment.model.graph.node)
