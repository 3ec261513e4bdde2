"""OpenVINO on Intel CPUs, which reads the QuantizeLinear and DequantizeLinear nodes of an ONNX file.

Schemes are onnxruntime's. What differs is that its kernels compute any activation function in float before
they round, so none of them needs a rounding of its own after a layer. As it runs by default it may drop the
rounding on one branch of a sum and be 3 steps off. Compare it with ``LP_TRANSFORMS_MODE=NO`` and the
precision hint f32, where it is at most one step off.

A zero point other than 0 makes a padded convolution take up to twice as long, and others a tenth to a fifth
longer (measured with AMX). The parts of a concat that have scales of their own are rounded again, one by one.
A labelling without both is measured with the others.

3-D convolutions stay in float: on integers they are 0.6 to 1.7 times as fast (2026.4.1, AMX, six shapes). A
file with a grouped one does not load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.config.backends.base import Backend, Limits
from qtrace.scheme import QScheme

if TYPE_CHECKING:  # an op rule loads MegEngine, which a config does not need
    from qtrace.ops import OpCall

_FUNCTIONS = "relu relu6 clip leaky_relu prelu sigmoid silu hswish hsigmoid hard_sigmoid mish tanh"
_HEADS = (
    "conv1d conv2d conv_transpose2d linear matmul add sub mul avg_pool2d adaptive_avg_pool2d mean "
    "interpolate batch_norm"
)


def _slower(call: OpCall, first: bool) -> str:
    """Returns why a convolution is no faster on integers; "" if it is."""
    return "OpenVINO computes 3-D convolutions no faster on integers" if call.kind == "conv3d" else ""


BACKEND = Backend(
    name="openvino",
    activation=QScheme(bits=8, signed=False, symmetric=False, rounding="half_even"),
    weight=QScheme(bits=8, signed=True, symmetric=True, narrow=True, axis=0, rounding="half_even"),
    ops=frozenset(f"{_HEADS} {_FUNCTIONS} div maximum minimum concat stack".split()),
    fused=dict.fromkeys(_HEADS.split(), frozenset(_FUNCTIONS.split())),
    ties_concat=False,
    rounds_around_float=True,
    limits={
        "activation": Limits(bits=(8,), per_channel=False, affine=True, narrow=False),
        # Weights of fewer bits fit into int8.
        "weight": Limits(bits=(2, 3, 4, 5, 6, 7, 8), per_channel=True, affine=False, signed=True),
    },
    without_kernels=frozenset({"HardSigmoid", "Inverse"}),
    float_results=frozenset({"conv1d", "conv2d", "linear"}),
    slower_with_zero_point=frozenset({"conv1d", "conv2d", "conv_transpose2d", "linear"}),
    cost_table="openvino",
    runtime="openvino",
    slower=_slower,
    cures=frozenset({"held_forks", "biases_apart", "unsigned_weights", "unsigned_in_float"}),
)
