"""onnxruntime on CPU, through QuantizeLinear and DequantizeLinear nodes.

The schemes are those that its optimizer turns into integer kernels: uint8 affine activations (a Relu
vanishes into a zero point at 0) and int8 per-channel weights. Rounding is half to even.

A 3-D convolution of 16 channels or more is 1.9 to 14 times as fast on integers as in float (1.23.2, AMX,
seven shapes). One of fewer channels takes 2 to 10 times as long, and so do most grouped ones: these stay in
float.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.config.backends.base import Backend, Limits
from qtrace.scheme import QScheme

if TYPE_CHECKING:  # an op rule loads MegEngine, which a config does not need
    from qtrace.ops import OpCall

_CLAMPS = frozenset({"relu", "relu6", "clip"})
_HEADS = (
    "conv1d conv2d conv3d conv_transpose2d linear matmul add sub mul div maximum minimum avg_pool2d "
    "adaptive_avg_pool2d mean concat stack setitem where interpolate batch_norm"
)
_JOINS = ("concat", "stack", "setitem", "where")
_UNARY = "relu relu6 clip leaky_relu prelu sigmoid silu hswish hsigmoid hard_sigmoid mish tanh neg abs"
# Without an integer kernel in onnxruntime 1.23: measured, as tests/targets/onnxruntime/test_backend.py does.
_IN_FLOAT = "conv_transpose2d sub div mean interpolate silu hswish hsigmoid hard_sigmoid mish tanh"

# A 3-D convolution of fewer input channels is slower on integers.
_VOLUME_CHANNELS = 16


def _slower(call: OpCall, first: bool) -> str:
    """Returns why a convolution is no faster on integers; "" if it is."""
    few = call.kind == "conv3d" and int(call.inputs[0].shape[1]) < _VOLUME_CHANNELS
    if few or (call.kind == "conv3d" and call.attrs["groups"] > 1):
        return (
            f"onnxruntime computes 3-D ones with groups or under {_VOLUME_CHANNELS} channels faster in float"
        )
    return ""


# What MatMulNBits takes.
_BLOCKS = (16, 32, 64, 128, 256)

BACKEND = Backend(
    name="onnxruntime",
    activation=QScheme(bits=8, signed=False, symmetric=False, rounding="half_even"),
    weight=QScheme(bits=8, signed=True, symmetric=True, narrow=True, axis=0, rounding="half_even"),
    ops=frozenset(f"{_HEADS} {_UNARY}".split()),
    # A clamp before QuantizeLinear is part of its saturation, whatever computes before it.
    fused={kind: _CLAMPS for kind in _HEADS.split() if kind not in _JOINS},
    ties_concat=False,
    rounds_around_float=True,
    scales_freely=True,
    limits={
        # 16 bits are ONNX types from opset 21 on; fewer bits than 8 fit into int8.
        "activation": Limits(bits=(4, 8, 16), per_channel=False, affine=True, narrow=False),
        "weight": Limits(
            bits=(2, 3, 4, 5, 6, 7, 8, 16), per_channel=True, affine=True, blocks=_BLOCKS, block_bits=(4,)
        ),
    },
    float_kernels=frozenset(_IN_FLOAT.split()),
    float_results=frozenset({"linear", "matmul"}),
    cost_table="onnxruntime",
    dynamic=frozenset({"linear"}),
    weight_only=frozenset(["linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d"]),
    contrib_weights=True,
    slower=_slower,
    cures=frozenset({"held_floats", "columns", "float_maxima", "unsigned_weights"}),
)
