"""LSQ+: scale and offset are learned with the weights."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor

from qtrace.fakequant.base import FakeQuant, builtin, refuse_powers_of_two
from qtrace.fakequant.kernels import Learn, StepGain, step_gain, straight_through
from qtrace.numerics import SMALLEST_SCALE
from qtrace.plugins.options import OptionModel

__all__ = ["LSQPlusFakeQuant"]


@builtin
class LSQPlusFakeQuant(FakeQuant):
    """LSQ with a learned offset (Bhalgat et al. 2020, "LSQ+: Improving low-bit quantization ...", section 3).

    An affine scheme learns its scale s and the real number b that the integer 0 stands for: ``x = q s + b``
    in the paper. Runtimes need an integer zero point, so that 0 and padding are exact. It is
    ``round(-b / s)``, with the gradient straight through, which gives the paper's gradients::

        dy/db = 0 inside, 1 outside        dy/ds = q - v inside, q outside

    with q and v counted from b, not from the zero point. A symmetric scheme lacks an offset, like the
    weights of the paper, and is LSQ. Both gradients are multiplied by LSQ's ``1 / sqrt(N * Q)``. The paper
    starts from the observer ``lsq_plus`` for weights and with ``mse`` for activations.

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
        if not self.scheme.symmetric:
            self.offset = Parameter(np.zeros(self.shape, np.float32))

    def _learn(self) -> Learn:
        gain = step_gain(self.grad_scale, self.scheme, self.numel)
        return Learn(gain, zero_point=not self.scheme.symmetric)

    def _derived(self) -> tuple[Tensor, Tensor]:
        scheme = self.scheme
        if scheme.symmetric:
            return super()._derived()
        scale = F.maximum(F.abs(self.scale), SMALLEST_SCALE)
        return scale, straight_through(F.clip(-self.offset / scale, scheme.qmin, scheme.qmax), F.round)

    def _adopt(self, scale: np.ndarray, zero_point: np.ndarray) -> None:
        if not self.scheme.symmetric:
            self.offset._reset(Parameter(-zero_point * scale))
