"""Qualcomm's AI Engine Direct (QNN) and its sibling SNPE, on the Hexagon tensor processor.

Activations are unsigned and affine, of 8 or 16 bits (those stay exact enough for box regression). Weights
are symmetric int8, or int4, with a scale per channel, or affine with one scale per tensor. Every tensor has
parameters of its own, the result of a concatenation too. A convolution reads and gives equally many bits, and
what reads its result in others rounds it again. Sigmoid and tanh of 16 bits have fixed ranges, the weight of
a fully connected layer has one scale, and no range is smaller than 1e-4. SiLU is a sigmoid and a product
there, with a rounding between the two. Half to even is the rounding of its quantization tools;
the processor's own was not measured.
"""

from qtrace.config.backends.base import Backend, Limits
from qtrace.scheme import QScheme

_CLAMPS = frozenset({"relu", "relu6", "clip"})
_HEADS = (
    "conv2d conv_transpose2d linear matmul add sub mul div avg_pool2d adaptive_avg_pool2d mean sum "
    "interpolate batch_norm"
)
_OTHERS = "maximum minimum concat stack leaky_relu prelu sigmoid silu hswish hsigmoid tanh"

BACKEND = Backend(
    name="qnn",
    activation=QScheme(bits=8, signed=False, symmetric=False, rounding="half_even"),
    weight=QScheme(bits=8, signed=True, symmetric=True, narrow=True, axis=0, rounding="half_even"),
    ops=_CLAMPS | frozenset(f"{_HEADS} {_OTHERS}".split()),
    fused=dict.fromkeys(_HEADS.split(), _CLAMPS),
    ties_concat=False,
    rounds_around_float=True,
    limits={
        "activation": Limits(bits=(8, 16), per_channel=False, affine=True, signed=False, narrow=False),
        "weight": Limits(bits=(4, 8), per_channel=True, affine=True),
    },
    device="the Hexagon tensor processor",
    floats_run_on="the device in 16-bit floats, or the CPU",
    integer_layers=True,
    # A fully connected layer may be a MatMul in the file, whose weight has one scale.
    weights_per_tensor=frozenset({"linear"}),
    # A product with a gate: the rounding of the gate is simulated, too.
    pieces={"silu": "silu", "hswish": "gated_hswish"},
    one_width=frozenset({"conv2d", "conv_transpose2d"}),
    # Scales 1/65536 and 1/32768, with zero points 0 and 32768.
    fixed_results={
        "sigmoid": {16: (0.0, 65535 / 65536)},
        "tanh": {16: (-1.0, 32767 / 32768)},
    },
    smallest_range=1e-4,
    cures=frozenset({"held_floats"}),
)
