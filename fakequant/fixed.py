"""Fake quantization with fixed parameters and a straight-through gradient."""

from __future__ import annotations

from qtrace.fakequant.base import FakeQuant, builtin
from qtrace.fakequant.kernels import Learn

__all__ = ["FixedFakeQuant"]


@builtin
class FixedFakeQuant(FakeQuant):
    """Keeps the calibrated scale and zero point while the weights train.

    The gradient passes unchanged where the value is in range and is zero where it clips
    (Bengio et al. 2013, "Estimating or propagating gradients through stochastic neurons").
    """

    def _learns_scale(self) -> bool:
        return False

    def _learn(self) -> Learn | None:
        return None
