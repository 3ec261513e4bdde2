"""DoReFa: weights pass through a tanh before they are rounded."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
from megengine import Tensor

from qtrace.fakequant.base import FakeQuant, builtin
from qtrace.fakequant.kernels.kernel import Learn
from qtrace.numerics import SMALLEST_SCALE
from qtrace.plugins.options import OptionModel

__all__ = ["DoReFaFakeQuant"]

# The largest weight counts as at least this share of the range: those of a dead channel stay next to 0.
_LEAST_PEAK = 2.0**-8
# The largest weight lies this much inside the range: rounding errors must not make it one that clips.
_INSIDE = 1.0 - 2.0**-20


@builtin
class DoReFaFakeQuant(FakeQuant):
    """Zhou et al. 2016, "DoReFa-Net: Training Low Bitwidth Convolutional Neural Networks ...", section 2.3.

    A weight w is rounded as ``T tanh(w) / max |tanh(w)|`` (eq. 9, the maximum over the tensor, or over the
    channel with a scale of its own), with the gradient through tanh and maximum. So large weights are drawn
    together and the levels are used to the end. The paper has T = 1 and levels at odd multiples of half a
    step, without a 0; here T is the calibrated range, so that a trained network keeps its magnitude, and
    the levels are the integers of the scheme, as runtimes have them. Observe weights with ``minmax``: a range
    that clips would shrink all weights by what it clips.

    Activations are clipped to their calibrated range with a straight-through gradient (eq. 11), as are
    parameters with an affine scheme: that is ``fixed``. Gradients are not quantized (section 2.4 of the
    paper).

    ``convert`` writes the transformed weights; their integers are those that were trained.
    """

    Options = OptionModel

    def _learns_scale(self) -> bool:
        return False

    def _setup(self, options: dict[str, Any]) -> None:
        self.transforms = self.static and self.scheme.symmetric

    def _learn(self) -> Learn | None:
        return None

    def shaped(self, x: Tensor) -> Tensor:
        """The weight that is rounded, of the shape of ``x``."""
        if not self.transforms:
            return x
        bent = F.tanh(x)
        axes = [axis for axis, size in enumerate(self.shape) if size == 1]
        size = F.abs(bent)
        peak = F.max(size, axis=axes, keepdims=True) if axes else size if self.shape else F.max(size)
        reach = self.scale * ((self.scheme.qmax - self.scheme.symmetric_zero_point) * _INSIDE)
        return bent / F.maximum(peak, F.maximum(reach * _LEAST_PEAK, SMALLEST_SCALE)) * reach
