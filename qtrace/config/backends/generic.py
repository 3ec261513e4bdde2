"""No runtime in particular: any scheme for any op, to see what a number of bits costs or to train for it.

The defaults are onnxruntime's. Nothing promises that a runtime computes what the graph does.
"""

from dataclasses import replace

from qtrace.config.backends.base import Backend, Limits
from qtrace.scheme import QScheme

_CLAMPS = frozenset({"relu", "relu6", "clip"})
_HEADS = (
    "conv1d conv2d conv3d conv_transpose2d conv_transpose3d linear matmul add sub mul div neg abs maximum "
    "minimum sum mean avg_pool2d adaptive_avg_pool2d interpolate batch_norm"
)
_OTHERS = "concat stack leaky_relu prelu sigmoid silu hswish hsigmoid hard_sigmoid mish tanh"
_ANY = Limits(bits=tuple(range(2, 17)), per_channel=True, affine=True, affine_per_channel=True)

BACKEND = Backend(
    name="generic",
    activation=QScheme(bits=8, signed=False, symmetric=False, rounding="half_even"),
    weight=QScheme(bits=8, signed=True, symmetric=True, narrow=True, axis=0, rounding="half_even"),
    ops=_CLAMPS | frozenset(f"{_HEADS} {_OTHERS}".split()),
    fused=dict.fromkeys(_HEADS.split(), _CLAMPS),
    ties_concat=False,
    rounds_around_float=True,
    limits={"activation": _ANY, "weight": replace(_ANY, blocks=(16, 32, 64, 128, 256))},
    without_kernels=frozenset({"Inverse"}),
    any_rounding=True,
    dynamic=frozenset({"linear"}),
    cures=frozenset({"held_floats", "columns"}),
    weight_only=frozenset(["linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d"]),
)
