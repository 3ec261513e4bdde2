"""LSQ: the scale is learned with the weights."""

from __future__ import annotations

import math
from typing import Any

from megengine import Tensor

from qtrace.errors import ConfigError
from qtrace.fakequant.base import FakeQuant, builtin, reject_options

__all__ = ["LSQFakeQuant"]


@builtin
class LSQFakeQuant(FakeQuant):
    """Learned step size (Esser et al. 2020, "Learned Step Size Quantization").

    The scale's gradient is eq. 3 of the paper, written relative to the zero point so that it holds for
    affine schemes, times ``1 / sqrt(N * Q)`` (section 2.2): N is the number of values that share the
    scale (weights of the layer or channel, features of one sample), Q the number of positive levels, for
    an affine scheme the number of all levels. The zero point stays as calibrated.
    """

    def _learns_scale(self) -> bool:
        return True

    def _setup(self, options: dict[str, Any]) -> None:
        reject_options("lsq", options)
        if self.scheme.power_of_two:
            raise ConfigError(
                f"{self.site}: lsq learns any scale, but {self.scheme.describe()} wants powers of two: "
                "use fakequant 'fixed' there."
            )

    def _train(self, x: Tensor) -> Tensor:
        levels = self.scheme.qmax if self.scheme.symmetric else self.scheme.qmax - self.scheme.qmin
        return self.quantize_dequantize(x, scale_gain=1.0 / math.sqrt(self.numel * levels))
