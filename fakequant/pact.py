"""PACT: the value at which an activation clips is learned."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor

from qtrace.fakequant.base import FakeQuant, builtin, refuse_powers_of_two
from qtrace.fakequant.kernels import Learn
from qtrace.numerics import SMALLEST_SCALE

__all__ = ["PACTFakeQuant"]


@builtin
class PACTFakeQuant(FakeQuant):
    """Parameterized clipping (Choi et al. 2018, "PACT: Parameterized Clipping Activation ...", section 3).

    After a ReLU the range is [0, a] with ``s = a / (levels - 1)`` and, eq. 3 of the paper, ``dy/da`` is 1
    where the value clips and 0 elsewhere. Unlike LSQ, rounding inside the range does not move it.

    The paper has one-sided ranges only. For other ranges, a is the end farther from 0. The other end keeps
    its calibrated ratio to a (the zero point stays), which also weighs the gradient of values that clip
    there. So a symmetric range is [-a, a].

    The paper's ``lambda * a**2`` in the loss is weight decay on a: `range_decay` of `qtrace.param_groups`.
    """

    def _learns_scale(self) -> bool:
        return False

    def _setup(self, options: dict[str, Any]) -> None:
        refuse_powers_of_two(self)
        self.bound = Parameter(np.zeros(self.shape, np.float32))

    def _learn(self) -> Learn:
        return Learn(residual=False)

    def _derived(self) -> tuple[Tensor, Tensor]:
        zero_point = self.zero_point
        steps = F.maximum(self.scheme.qmax - zero_point, zero_point - self.scheme.qmin)
        if self.scheme.symmetric:
            steps = self.scheme.qmax - zero_point
        return F.maximum(F.abs(self.bound) / steps, SMALLEST_SCALE), zero_point

    def _adopt(self, scale: np.ndarray, zero_point: np.ndarray) -> None:
        steps = self.scheme.qmax - zero_point
        if not self.scheme.symmetric:
            steps = np.maximum(steps, zero_point - self.scheme.qmin)
        self.bound._reset(Parameter(steps * scale))
