"""TQT: the threshold of a power-of-two scale is learned."""

from __future__ import annotations

import math
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor
from megengine.autodiff import Function

from qtrace.errors import ConfigError
from qtrace.fakequant.base import FakeQuant, builtin
from qtrace.fakequant.kernels import Learn
from qtrace.numerics import SMALLEST_SCALE

__all__ = ["TQTFakeQuant"]


class _NextPowerOfTwo(Function):
    """Computes ``2**ceil(x)`` with the gradient of ``2**x`` at ``ceil(x)``; an instance serves one call.

    Args:
        shape: shape of x (MegEngine 1.13 gives a scalar's power and its gradient the shape (1,)).
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        self.saved = (2.0 ** F.ceil(x)).reshape(self.shape)
        return self.saved

    def backward(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:  # a consumer of the scale, such as a bias, may pass no gradient
            return None
        return (grad * self.saved * math.log(2.0)).reshape(self.shape)


@builtin
class TQTFakeQuant(FakeQuant):
    """Trained quantization thresholds (Jain et al. 2019, "Trained Quantization Thresholds for Accurate and
    Efficient Fixed-Point Inference of Deep Neural Networks", section 3).

    The logarithm l of the threshold is learned, and the scale is always a power of two:
    ``s = 2**ceil(l) / 2**(bits - 1)`` (``2**bits`` when unsigned), with the gradient straight through ceil,
    which is eq. 8 of the paper::

        dy/dl = s ln 2 (q - v) inside,  s ln 2 q outside

    Every scheme needs ``power_of_two: true``. An affine one keeps its calibrated zero point: after a ReLU,
    at the smallest integer, that is the unsigned form of the paper.

    After calibration l lies in the middle of its octave, so that one small step does not change the scale.
    """

    def _learns_scale(self) -> bool:
        return False

    def _setup(self, options: dict[str, Any]) -> None:
        if not self.scheme.power_of_two:
            raise ConfigError(
                f"{self.site}: tqt learns powers of two, but {self.scheme.describe()} has any scale: set "
                "power_of_two: true, or use fakequant 'lsq' there."
            )
        self.log2_threshold = Parameter(np.zeros(self.shape, np.float32))

    def _learn(self) -> Learn:
        return Learn()

    def _derived(self) -> tuple[Tensor, Tensor]:
        scale = _NextPowerOfTwo(self.shape)(self.log2_threshold - self._magnitude_bits())
        return F.maximum(scale, SMALLEST_SCALE), self.zero_point

    def _adopt(self, scale: np.ndarray, zero_point: np.ndarray) -> None:
        exponent = np.log2(np.maximum(scale.astype(np.float64), SMALLEST_SCALE))
        middle = exponent + self._magnitude_bits() - 0.5
        self.log2_threshold._reset(Parameter(middle.astype(np.float32)))

    def _magnitude_bits(self) -> int:
        return self.scheme.bits - self.scheme.signed
