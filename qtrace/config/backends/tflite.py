"""LiteRT (TensorFlow Lite) on CPU: int8 affine activations, int8 symmetric weights, int32 biases.

As in its 8-bit quantization specification, weights lie in -127 to 127. Rounding is that of the XNNPACK
delegate, which runs by default and equals half to even; the reference kernels round half away from zero.

A function of one value is exact: between roundings it becomes a look-up. Averages of windows and bilinear
resizing are not on integers here, since their kernels give results of the input's scale.
"""

from qtrace.config.backends.base import Backend, Limits
from qtrace.scheme import QScheme

# A clip is a fused RELU6 or RELU_N1_TO_1 when its bounds are those; they are in the nets that have one.
_CLAMPS = frozenset({"relu", "relu6", "clip"})
_HEADS = "conv2d conv_transpose2d linear add sub mul"
_FUNCTIONS = "leaky_relu prelu sigmoid silu hswish hsigmoid tanh"
_OTHERS = "matmul div neg adaptive_avg_pool2d mean sum concat stack"

BACKEND = Backend(
    name="tflite",
    activation=QScheme(bits=8, signed=True, symmetric=False, rounding="half_even"),
    weight=QScheme(bits=8, signed=True, symmetric=True, narrow=True, axis=0, rounding="half_even"),
    ops=_CLAMPS | frozenset(f"{_HEADS} {_OTHERS} {_FUNCTIONS}".split()),
    fused=dict.fromkeys(_HEADS.split(), _CLAMPS),
    computed_weights="refused",
    ties_concat=True,
    rounds_around_float=True,
    limits={
        # Integers of 16 bits have no zero point there; weights keep 8, and a kernel has one width.
        "activation": Limits(
            bits=(8, 16), per_channel=False, affine=True, signed=True, narrow=False, symmetric_bits=(16,)
        ),
        "weight": Limits(bits=(8,), per_channel=True, affine=False, signed=True, wide=False),
    },
    cost_table="litert",
    integer_layers=True,
)
