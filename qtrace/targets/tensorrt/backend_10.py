"""TensorRT up to release 10 on NVIDIA GPUs, through a calibration cache ("implicit quantization").

A layer runs on integers only if the cache has a scale for each of its tensors, so every result is rounded.
Release 11 reads no caches: the backend ``tensorrt`` is for QuantizeLinear nodes.

Every zero point is 0; a scale is the largest magnitude divided by 127. Ties go to the even integer.
Activation functions after a layer are computed in float within its kernel. The inputs of a concatenation
share one scale: only then is it a copy.
"""

from qtrace.config.backends.base import Backend, Limits
from qtrace.scheme import QScheme

_FUNCTIONS = "relu relu6 clip leaky_relu sigmoid silu hswish hsigmoid tanh"
_HEADS = "conv2d conv_transpose2d linear matmul add mul avg_pool2d adaptive_avg_pool2d interpolate"

BACKEND = Backend(
    name="tensorrt_10",
    activation=QScheme(bits=8, signed=True, symmetric=True, rounding="half_even"),
    # Activations use -128, weights do not.
    weight=QScheme(bits=8, signed=True, symmetric=True, narrow=True, axis=0, rounding="half_even"),
    ops=frozenset(f"{_HEADS} {_FUNCTIONS} sub maximum minimum concat stack".split()),
    fused=dict.fromkeys(_HEADS.split(), frozenset(_FUNCTIONS.split())),
    ties_concat=True,
    rounds_around_float=True,
    without_kernels=frozenset({"Inverse"}),
    limits={
        "activation": Limits(bits=(8,), per_channel=False, affine=False, signed=True, narrow=False),
        # Weights of fewer bits fit into int8.
        "weight": Limits(bits=(2, 3, 4, 5, 6, 7, 8), per_channel=True, affine=False, signed=True),
    },
    device="an NVIDIA GPU with TensorRT",
)
