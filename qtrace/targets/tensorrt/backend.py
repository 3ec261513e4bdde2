"""TensorRT 10 and 11 on NVIDIA GPUs, through QuantizeLinear and DequantizeLinear ("explicit quantization").

Every zero point is 0; a scale is the largest magnitude divided by 127. Ties go to the even integer. The
export has what TensorRT's parser and its own quantization tool agree on:

- A tensor is rounded where an op on integers reads it. Nothing is rounded between a layer and the functions
  after it, which its kernel computes in float.
- The sum of a convolution and a residual input is one kernel: only the residual input is rounded.
- Biases are floats: an int32 DequantizeLinear does not parse.
- The inputs of a concatenation share one scale: only then is it a copy.

Layers that are no faster on integers stay float: thin products and convolutions of few channels.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from qtrace.targets.tensorrt.backend_10 import BACKEND as _IMPLICIT

if TYPE_CHECKING:
    from qtrace.ops import OpCall

_FUNCTIONS = "relu relu6 clip leaky_relu prelu sigmoid silu hswish hsigmoid tanh"
_CONVS = "conv2d conv_transpose2d"
# The ops that TensorRT's own tool quantizes, but for Clip, which is part of the kernel before it. Functions,
# resizing and other elementwise ops gain nothing by themselves: they run in float, in the kernel before them.
_HEADS = f"{_CONVS} linear matmul add mul avg_pool2d adaptive_avg_pool2d batch_norm"

# The fewest channels, columns and inner sizes for which integer kernels pay; others run padded to them.
_FEWEST = 16


def _slower(call: OpCall, first: bool) -> str:
    """Says why a layer or product is no faster on integers, as TensorRT's own tool decides."""
    if call.kind in _CONVS.split():
        channels = [int(node.shape[1]) for node in (call.inputs[0], call.out)]
        if not first and min(channels) < _FEWEST and any(n % 8 for n in channels):
            return f"a convolution from {channels[0]} to {channels[1]} channels is no faster on integers"
    elif call.kind in ("linear", "matmul"):
        rows, columns = _outer_sizes(call)
        inner = int(call.inputs[0].shape[-2 if call.attrs.get("transpose_a") else -1])
        if min(inner, columns) < _FEWEST:
            return f"a product of inner size {inner} and {columns} columns is no faster on integers"
        if call.kind == "matmul" and min(rows, columns) == 1:
            return "a product with a vector is no faster on integers"
    return ""


def _outer_sizes(call: OpCall) -> tuple[int, int]:
    """Returns the numbers of rows and columns of a product's result."""
    shape = [int(n) for n in call.out.shape]
    if call.kind == "linear":
        return math.prod(shape[:-1]), shape[-1]
    return (shape[-2] if len(shape) > 1 else 1), (shape[-1] if shape else 1)


BACKEND = replace(
    _IMPLICIT,
    name="tensorrt",
    ops=frozenset(f"{_HEADS} concat stack".split()),
    fused=dict.fromkeys(_HEADS.split(), frozenset(_FUNCTIONS.split())),
    biases="float",
    added_unrounded=frozenset(_CONVS.split()),
    rounds_for_readers=True,
    slower=_slower,
)
