"""ncnn on ARM and x86 CPUs: int8 convolutions and inner products between float tensors.

Activations and weights are symmetric in -127 to 127, ties go away from zero. A layer rounds what it reads;
its result is float, after an activation function in its kernel. Everything else is computed in float, so
no concatenation ties anything. The recipe ``backend/ncnn`` says that results are not rounded.

Grouped convolutions stay in float. On x86, MobileNetV2 and V3 are 1.18 and 1.17 times as fast as float so,
and 0.95 and 0.97 times with all convolutions on integers. A rule with ``quantize: true`` rounds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.config.backends.base import Backend, Limits
from qtrace.scheme import QScheme

if TYPE_CHECKING:
    from qtrace.ops import OpCall

_SCHEME = QScheme(bits=8, signed=True, symmetric=True, narrow=True, rounding="half_away")
_FUNCTIONS = "relu relu6 clip leaky_relu sigmoid hswish"


def _slower(call: OpCall, first: bool) -> str:
    """Returns why a convolution is no faster on integers; "" if it is."""
    if call.kind == "conv2d" and call.attrs["groups"] > 1:
        return "ncnn computes grouped convolutions faster in float"
    return ""


BACKEND = Backend(
    name="ncnn",
    activation=_SCHEME,
    weight=_SCHEME.replace(axis=0),
    ops=frozenset({"conv2d", "linear"}),
    fused=dict.fromkeys(("conv2d", "linear"), frozenset(_FUNCTIONS.split())),
    computed_weights="refused",
    ties_concat=False,
    without_kernels=frozenset({"Inverse"}),
    limits={
        "activation": Limits(bits=(8,), per_channel=False, affine=False, signed=True, wide=False),
        "weight": Limits(bits=(8,), per_channel=True, affine=False, signed=True, wide=False),
    },
    float_results=frozenset({"conv2d", "linear"}),
    cost_table="ncnn",
    rounds_for_speed=True,
    slower=_slower,
)
