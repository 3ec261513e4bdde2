"""Espressif's ESP-DL on an ESP32-P4: symmetric int8 with scales that are powers of two.

Activations have one scale, and so have weights, unless a config asks for one for each output channel of a
convolution. The chip shifts instead of multiplying, and rounds ties to the even neighbour. The inputs of a
concatenation share one scale. Source: the operators and the rounding in ``operator_support_state.md`` and the
quantization specification of ESP-DL. Its convolutions have one group, or one for each channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.config.backends.base import Backend, Limits
from qtrace.scheme import QScheme

if TYPE_CHECKING:
    from qtrace.ops import OpCall

_SCHEME = QScheme(bits=8, signed=True, symmetric=True, power_of_two=True, rounding="half_even")
_LIMITS = Limits(bits=(8,), per_channel=False, affine=False, signed=True, only_power_of_two=True)
_HEADS = "conv2d linear matmul add sub mul div"
_OTHERS = (
    "relu relu6 clip leaky_relu prelu sigmoid tanh hsigmoid hswish avg_pool2d adaptive_avg_pool2d concat "
    "interpolate"
)


def _without_kernel(call: OpCall, first: bool) -> str:
    """Returns why ESP-DL lacks a kernel for a convolution; "" if it has one."""
    groups = call.attrs.get("groups", 1)
    if call.kind != "conv2d" or groups in (1, call.inputs[0].shape[1]):
        return ""
    return f"ESP-DL has kernels for 1 group or one for each channel, not for {groups}"


BACKEND = Backend(
    name="esp_dl",
    activation=_SCHEME,
    weight=_SCHEME.replace(narrow=True),
    ops=frozenset(f"{_HEADS} {_OTHERS}".split()),
    fused={"conv2d": frozenset({"relu"}), "linear": frozenset({"relu"})},
    ties_concat=True,
    without_kernels=frozenset({"Inverse"}),
    limits={
        "activation": _LIMITS,
        "weight": Limits(bits=(8,), per_channel=True, affine=False, signed=True, only_power_of_two=True),
    },
    device="ESP32-P4",
    integer_layers=True,
    slower=_without_kernel,
)
