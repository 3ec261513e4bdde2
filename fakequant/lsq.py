"""LSQ: the scale is learned with the weights."""

from __future__ import annotations

from typing import Any

from qtrace.fakequant.base import FakeQuant, builtin, refuse_powers_of_two
from qtrace.fakequant.kernels import Learn, StepGain, step_gain
from qtrace.plugins.options import OptionModel

__all__ = ["LSQFakeQuant"]


@builtin
class LSQFakeQuant(FakeQuant):
    """Learned step size (Esser et al. 2020, "Learned Step Size Quantization").

    The scale's gradient is eq. 3 of the paper, written relative to the zero point so that it holds for affine
    schemes, times ``1 / sqrt(N * Q)`` (section 2.2): N is the number of values that share the scale (weights
    of the layer or channel, features of one sample). Q is the number of positive levels, or of all levels of
    an affine scheme. The zero point stays as calibrated.

    Options:
        grad_scale: true for this factor, false for 1, or another factor.
    """

    class Options(OptionModel):
        grad_scale: StepGain = True

    def _learns_scale(self) -> bool:
        return True

    def _setup(self, options: dict[str, Any]) -> None:
        refuse_powers_of_two(self)
        self.grad_scale = options["grad_scale"]

    def _learn(self) -> Learn:
        return Learn(step_gain(self.grad_scale, self.scheme, self.numel))
