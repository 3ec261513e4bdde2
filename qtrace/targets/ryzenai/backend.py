"""AMD's Ryzen AI on its neural processor, through QuantizeLinear and DequantizeLinear (A8W8 and A16W8).

Activations are symmetric int8, or int16 on request, weights symmetric int8; scales are any floats. Biases are
int32 at the scale of the accumulator. The inputs of a concatenation share one scale. Half to even is the
rounding of AMD's quantization tool; the processor's own was not measured.
"""

from qtrace.config.backends.base import Backend, Limits
from qtrace.scheme import QScheme

_CLAMPS = frozenset({"relu", "relu6", "clip"})
_HEADS = (
    "conv2d conv_transpose2d linear matmul add sub mul div avg_pool2d adaptive_avg_pool2d mean interpolate "
    "batch_norm"
)
_OTHERS = "concat stack leaky_relu prelu sigmoid silu hswish hsigmoid tanh"

BACKEND = Backend(
    name="ryzenai",
    activation=QScheme(bits=8, signed=True, symmetric=True, rounding="half_even"),
    weight=QScheme(bits=8, signed=True, symmetric=True, narrow=True, axis=0, rounding="half_even"),
    ops=_CLAMPS | frozenset(f"{_HEADS} {_OTHERS}".split()),
    fused=dict.fromkeys(_HEADS.split(), _CLAMPS),
    ties_concat=True,
    rounds_around_float=True,
    integer_layers=True,
    limits={
        "activation": Limits(bits=(8, 16), per_channel=False, affine=False, signed=True, narrow=False),
        "weight": Limits(bits=(8,), per_channel=True, affine=False, signed=True),
    },
    device="the neural processor of Ryzen AI",
    floats_run_on="the CPU",
    pieces={"silu": "silu", "hswish": "gated_hswish"},
    cures=frozenset({"held_floats"}),
)
