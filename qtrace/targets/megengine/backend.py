"""MegEngine's own int8 kernels: one symmetric scale per tensor, rounding half away from zero."""

from qtrace.config.backends.base import Backend, Limits
from qtrace.scheme import QScheme

_INT8 = QScheme(bits=8, signed=True, symmetric=True, narrow=False, rounding="half_away")
_RELU = frozenset({"relu"})

BACKEND = Backend(
    name="megengine",
    activation=_INT8,
    weight=_INT8,
    ops=frozenset({"conv2d", "conv_transpose2d", "linear", "add", "avg_pool2d", "concat", "relu"}),
    fused={"conv2d": _RELU, "add": _RELU},
    computed_weights="float",
    ties_concat=True,
    integer_layers=True,
    without_kernels=frozenset({"Inverse"}),
    limits={
        "activation": Limits(bits=(8,), per_channel=False, affine=False, signed=True, narrow=False),
        "weight": Limits(bits=(8,), per_channel=False, affine=False, signed=True),
    },
)
