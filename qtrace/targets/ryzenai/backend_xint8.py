"""AMD's Ryzen AI on its neural processor in XINT8: integers of 8 bits with scales that are powers of two.

Activations, weights and biases are symmetric int8, each tensor with one scale. The processor shifts instead
of multiplying. The inputs of a concatenation share one scale. Half to even is the rounding of AMD's
quantization tool; the processor's own was not measured.
"""

from dataclasses import replace

from qtrace.config.backends.base import Limits
from qtrace.scheme import QScheme
from qtrace.targets.ryzenai.backend import BACKEND as _A8W8

_INT8 = QScheme(bits=8, signed=True, symmetric=True, power_of_two=True, rounding="half_even")
_LIMITS = Limits(bits=(8,), per_channel=False, affine=False, signed=True, only_power_of_two=True)

BACKEND = replace(
    _A8W8,
    name="ryzenai_xint8",
    activation=_INT8,
    weight=_INT8.replace(narrow=True),
    biases=_INT8,
    limits={"activation": replace(_LIMITS, narrow=False), "weight": _LIMITS},
)
