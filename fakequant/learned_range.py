"""Range learning: the ends of the range are learned with the weights."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor

from qtrace.fakequant.base import FakeQuant, builtin, refuse_powers_of_two
from qtrace.fakequant.kernels import Learn, straight_through
from qtrace.numerics import SMALLEST_SCALE

__all__ = ["LearnedRangeFakeQuant"]


@builtin
class LearnedRangeFakeQuant(FakeQuant):
    """Learns both ends of the range (Nagel et al. 2021, "A White Paper on Neural Network
    Quantization", sections 2.2 and 4.1; range learning).

    From the ends lo and hi follow ``s = (hi - lo) / (qmax - qmin)`` and ``z = round(qmin - lo / s)``. The
    gradient passes both, and straight through the rounding of z. With v and q counted from lo and Q levels::

        dy/dhi = (q - v) / Q inside, 1 above, 0 below        dy/dlo = -(q - v) / Q inside, 0 above, 1 below

    which are the gradients of TensorFlow's fake quant (Jacob et al. 2018) plus the rounding inside. 0 stays
    in the range. A symmetric scheme learns the upper end; the lower one is its mirror image.

    The ends are in units of the tensor, not of a step, so that one learning rate fits all bit widths.
    """

    def _learns_scale(self) -> bool:
        return False

    def _setup(self, options: dict[str, Any]) -> None:
        refuse_powers_of_two(self)
        self.high = Parameter(np.zeros(self.shape, np.float32))
        if not self.scheme.symmetric:
            self.low = Parameter(np.zeros(self.shape, np.float32))

    def _learn(self) -> Learn:
        return Learn(zero_point=not self.scheme.symmetric)

    def _derived(self) -> tuple[Tensor, Tensor]:
        scheme = self.scheme
        if scheme.symmetric:
            steps = scheme.qmax - scheme.symmetric_zero_point
            return F.maximum(F.abs(self.high) / steps, SMALLEST_SCALE), self.zero_point
        low, high = F.minimum(self.low, 0.0), F.maximum(self.high, 0.0)
        scale = F.maximum((high - low) / (scheme.qmax - scheme.qmin), SMALLEST_SCALE)
        zero_point = F.clip(scheme.qmin - low / scale, scheme.qmin, scheme.qmax)
        return scale, straight_through(zero_point, F.round)

    def _adopt(self, scale: np.ndarray, zero_point: np.ndarray) -> None:
        self.high._reset(Parameter((self.scheme.qmax - zero_point) * scale))
        if not self.scheme.symmetric:
            self.low._reset(Parameter((self.scheme.qmin - zero_point) * scale))
