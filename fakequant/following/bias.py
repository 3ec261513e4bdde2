"""The bias of an integer conv or linear layer: int32 at the scale of the accumulator."""

from __future__ import annotations

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.module import Module

from qtrace.fakequant.base import FakeQuant, builtin
from qtrace.fakequant.kernels import Levels, as_tensor, fits, quant_dequant
from qtrace.numerics import SMALLEST_NORMAL

__all__ = ["BIAS_LIMIT", "BIAS_QMAX", "BiasQuant"]

# The largest float32 below 2**31: the runtime adds the bias as int32.
BIAS_QMAX = int(np.nextafter(np.float32(2**31), np.float32(0)))
# The largest bias when scales are chosen; the rest of int32 is left to the products.
BIAS_LIMIT = float(2**30)


@builtin
class BiasQuant(Module):
    """Rounds a bias to int32 multiples of ``s_in * s_w``, as runtimes add it to their accumulators.

    It is without parameters of its own: each call takes the scales of the layer's input and weight
    sites, which may be learned.

    Args:
        site: the name of the bias site.
        shape: the shape of the bias.
        factor: the power of two that multiplies the activation's scale on the way to the layer.
    """

    def __init__(self, site: str, shape: tuple[int, ...], factor: float = 1.0) -> None:
        super().__init__()
        self.site, self.shape, self.factor = site, tuple(shape), factor
        self.phase = "float"

    def forward(self, bias: Tensor, activation: FakeQuant, weight: FakeQuant) -> Tensor:
        """Fake-quantizes ``bias``; a no-op in the phases float and observe.

        Args:
            bias: float32 of shape ``self.shape``.
            activation: the fake quant of the layer's input (per tensor).
            weight: the fake quant of the layer's weight (per tensor or per output channel).
        """
        if self.phase in ("float", "observe"):
            return bias
        return self.quantize(bias, activation.signed_scale(), weight.signed_scale())

    def quantize(self, bias: Tensor, activation: Tensor, weight: Tensor) -> Tensor:
        """Rounds ``bias`` to multiples of the product of two scales.

        Args:
            bias: float32 of shape ``self.shape``.
            activation: the input's scale, shape ``()``; the magnitude of both scales is applied.
            weight: the weight's scale, per tensor or in the weight's broadcast shape.
        """
        scale, shape = (
            self._product_of_arrays(activation, weight) if fits(bias) else self._product(activation, weight)
        )
        # Ties may go either way, as the exporter writes the integers. They go away from zero, since the fast
        # rounding half to even fails beyond 2**22.
        levels = Levels(-BIAS_QMAX, BIAS_QMAX, rounding="half_away", zero=0, min_scale=SMALLEST_NORMAL)
        return quant_dequant(bias, scale, None, levels, shape)

    def _product(self, activation: Tensor, weight: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Computes ``s_in * s_w`` (float32), broadcastable to the bias, and its shape."""
        # A weight has two axes or more; a Function of MegEngine returns a scalar as a vector of one element.
        shape = self.shape if weight.ndim > 1 else ()
        if self.factor != 1.0:
            activation = activation * self.factor
        return (activation * weight).reshape(shape), shape

    def _product_of_arrays(self, activation: Tensor, weight: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Computes `_product` in numpy, without a gradient: a bias gives none to its scale."""
        shape = self.shape if weight.ndim > 1 else ()
        product = activation.numpy() * np.float32(self.factor) * weight.numpy()
        return as_tensor(product.reshape(shape), weight), shape

    def scale(self, activation: FakeQuant, weight: FakeQuant) -> tuple[Tensor, tuple[int, ...]]:
        """Returns the scale that `forward` uses with two fake quants, and its shape."""
        product, shape = self._product(activation.signed_scale(), weight.signed_scale())
        return F.maximum(F.abs(product), SMALLEST_NORMAL), shape

    def _module_info_string(self) -> str:
        return f"{self.site}, int32, {self.phase}"
