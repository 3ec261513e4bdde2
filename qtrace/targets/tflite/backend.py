"""LiteRT (TensorFlow Lite) on CPU: int8 affine activations, int8 symmetric weights, int32 biases.

As in its 8-bit quantization specification, weights lie in -127 to 127. Rounding is as in the XNNPACK
delegate, which runs by default and equals half to even; the reference kernels round half away from zero.

A function of one value is exact: between roundings it becomes a look-up. SiLU is a sigmoid and a product,
with a rounding between the two: YOLOX-nano is 1.2 times as fast as with both in float. The mean of a window
is a depthwise convolution by ones, which rounds to any scale. AVERAGE_POOL_2D and RESIZE_BILINEAR give
results of their input's scale: the first is used where padding does not count, the second for every bilinear
resizing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.config.backends.base import Backend, Limits
from qtrace.scheme import QScheme

if TYPE_CHECKING:
    from qtrace.ops import OpCall

# A clip is a fused RELU6 or RELU_N1_TO_1 when its bounds are those; they are in the nets that have one.
_CLAMPS = frozenset({"relu", "relu6", "clip"})
_HEADS = "conv1d conv2d conv_transpose2d linear add sub mul"
_FUNCTIONS = "leaky_relu prelu sigmoid silu hswish hsigmoid hard_sigmoid mish tanh"
_OTHERS = "matmul div neg avg_pool2d adaptive_avg_pool2d interpolate mean sum concat stack"


def _keeps_grid(call: OpCall) -> bool:
    """Returns whether AVERAGE_POOL_2D or RESIZE_BILINEAR computes an op.

    AVERAGE_POOL_2D leaves out padding only by half of an odd window; other such means are computed in float.
    """
    if call.kind == "avg_pool2d":
        halves = all(k == 2 * p + 1 for k, p in zip(call.attrs["kernel"], call.attrs["padding"], strict=True))
        return any(call.attrs["padding"]) and not call.attrs["count_include_pad"] and halves
    return call.kind == "interpolate"


BACKEND = Backend(
    name="tflite",
    activation=QScheme(bits=8, signed=True, symmetric=False, rounding="half_even"),
    weight=QScheme(bits=8, signed=True, symmetric=True, narrow=True, axis=0, rounding="half_even"),
    ops=_CLAMPS | frozenset(f"{_HEADS} {_OTHERS} {_FUNCTIONS}".split()),
    fused=dict.fromkeys(_HEADS.split(), _CLAMPS),
    computed_weights="refused",
    ties_concat=True,
    keeps_grid=_keeps_grid,
    rounds_around_float=True,
    without_kernels=frozenset({"Inverse"}),
    limits={
        # Integers of 16 bits lack a zero point there; weights keep 8, and a kernel has one width.
        "activation": Limits(
            bits=(8, 16), per_channel=False, affine=True, signed=True, narrow=False, symmetric_bits=(16,)
        ),
        "weight": Limits(bits=(8,), per_channel=True, affine=False, signed=True, wide=False),
    },
    cost_table="litert",
    rounds_for_speed=True,
    integer_layers=True,
    # Two floats between integers, a sigmoid and a product, are no look-up: only a sigmoid is one.
    pieces={"silu": "silu"},
)
