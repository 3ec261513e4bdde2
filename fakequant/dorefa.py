"""DoReFa: weights pass through a tanh before they are rounded."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
from megengine import Tensor

from qtrace.fakequant.base import FakeQuant, builtin
from qtrace.fakequant.kernels import MARGIN_SHARE, Learn
from qtrace.numerics import SMALLEST_SCALE

__all__ = ["DoReFaFakeQuant"]

# The largest weight counts as at least this share of the range, so that a dead channel stays close to 0.
MIN_PEAK_SHARE = 2.0**-8
# The share of the range up to the largest weight, which must not clip by a rounding error.
PEAK_SHARE = 1.0 - MARGIN_SHARE


@builtin
class DoReFaFakeQuant(FakeQuant):
    """Zhou et al. 2016, "DoReFa-Net: Training Low Bitwidth Convolutional Neural Networks ...", section 2.3.

    A weight w is rounded as ``T tanh(w) / max |tanh(w)|`` (eq. 9, the maximum over the tensor, or over the
    channel with a scale of its own). The gradient goes through tanh and maximum. So large weights move
    together, and all levels are used. The paper has T = 1 and levels at odd multiples of half a step, without
    a 0. Here T is the calibrated range, so that a trained network keeps its magnitude, and the levels are the
    integers of the scheme, as in runtimes. Observe weights with ``minmax``: a narrower range would shrink all
    weights.

    Activations are clipped to their calibrated range with a straight-through gradient (eq. 11), as are
    parameters with an affine scheme, as by ``fixed``. Gradients are not quantized (section 2.4 of the
    paper).

    ``convert`` writes the transformed weights, whose integers are the trained ones.
    """

    def _learns_scale(self) -> bool:
        return False

    def _setup(self, options: dict[str, Any]) -> None:
        self.transforms = self.static and self.scheme.symmetric

    def _learn(self) -> Learn | None:
        return None

    def shaped(self, x: Tensor) -> Tensor:
        """Returns the transformed weight that is rounded, of the shape of ``x``."""
        if not self.transforms:
            return x
        transformed = F.tanh(x)
        axes = [axis for axis, size in enumerate(self.shape) if size == 1]
        magnitude = F.abs(transformed)
        peak = (
            F.max(magnitude, axis=axes, keepdims=True)
            if axes
            else magnitude
            if self.shape
            else F.max(magnitude)
        )
        reach = self.scale * ((self.scheme.qmax - self.scheme.symmetric_zero_point) * PEAK_SHARE)
        return transformed / F.maximum(peak, F.maximum(reach * MIN_PEAK_SHARE, SMALLEST_SCALE)) * reach
