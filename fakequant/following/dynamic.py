"""The input of a layer that is rounded by the range of each batch, as ONNX's DynamicQuantizeLinear does it.

With lo and hi the smallest and the largest value of the tensor and 0 (https://onnx.ai/onnx/operators,
DynamicQuantizeLinear)::

    scale = (hi - lo) / 255, 1 for a tensor of zeros
    zero_point = round(clip(-lo / scale, 0, 255))
    q = clip(round(x / scale) + zero_point, 0, 255)

in float32, with ties to even.
"""

from __future__ import annotations

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.module import Module

from qtrace.fakequant.base import builtin
from qtrace.fakequant.kernels import Levels, as_float32, quant_dequant
from qtrace.numerics import SMALLEST_NORMAL

__all__ = ["DYNAMIC_LEVELS", "DynamicQuant"]

DYNAMIC_LEVELS = Levels(0, 255, min_scale=SMALLEST_NORMAL)
"""The integers of a value that is rounded by its own range."""


@builtin
class DynamicQuant(Module):
    """Rounds a tensor to uint8 by its own range: it is without parameters and needs no calibration.

    Args:
        site: the name of the rounded tensor.
    """

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site
        self.phase = "float"
        # A tensor of the module: jit.trace divides by a number in the code as it multiplies by its inverse.
        self.steps = as_float32(np.array([255.0]))

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantizes ``x``, float32 of any shape; a no-op in the phases float and observe.

        The gradient passes straight through, but for an end that a rounded zero point leaves outside.
        """
        if self.phase in ("float", "observe"):
            return x
        scale, zero_point = self.grid(x)
        return quant_dequant(x, scale, zero_point, DYNAMIC_LEVELS, (1,))

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scale and the zero point of ``x``, float32 of shape (1,)."""
        values = x.detach()
        low = F.minimum(F.min(values), 0.0).reshape(1)
        high = F.maximum(F.max(values), 0.0).reshape(1)
        scale = (high - low) / self.steps
        scale = scale + (scale <= 0.0).astype("float32")
        one, zero = as_float32(np.ones(1)), as_float32(np.zeros(1))
        return scale, quant_dequant(-low / scale, one, zero, DYNAMIC_LEVELS, (1,))

    def _module_info_string(self) -> str:
        return f"{self.site}, uint8 by the range of each batch, {self.phase}"
