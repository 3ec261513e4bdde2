"""The bias of an integer conv or linear layer: int32 at the scale of the accumulator."""

from __future__ import annotations

import megengine.functional as F
from megengine import Tensor
from megengine.module import Module

from qtrace.fakequant.base import FakeQuant, builtin
from qtrace.fakequant.kernels.kernel import Levels, quant_dequant
from qtrace.numerics import SMALLEST_NORMAL

__all__ = ["BIAS_LIMIT", "BIAS_QMAX", "BiasQuant"]

# The largest float32 below 2**31: the runtime adds the bias as int32.
BIAS_QMAX = 2147483520
# What a bias may take of that when scales are chosen; as much is left to the products.
BIAS_LIMIT = float(2**30)


@builtin
class BiasQuant(Module):
    """Rounds a bias to int32 multiples of ``s_in * s_w``, as runtimes add it to their accumulators.

    It has no parameters of its own: the scales are those of the layer's input and weight sites, which
    are passed at each call, so that learned scales are followed.

    Args:
        site: the name of the bias site.
        shape: the shape of the bias.
        factor: by what the activation's scale is multiplied on the way to the layer; a power of two.
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
            activation: the input's scale, shape ``()``; of both the magnitude counts.
            weight: the weight's scale, per tensor or in the weight's broadcast shape.
        """
        scale, shape = self._product(activation, weight)
        # Which way a tie goes is ours to say, for the exporter writes the integers: away from zero, since
        # the trick that rounds half to even fails beyond 2**22.
        levels = Levels(-BIAS_QMAX, BIAS_QMAX, half_even=False, zero=0, least=SMALLEST_NORMAL)
        return quant_dequant(bias, scale, None, levels, shape)

    def _product(self, activation: Tensor, weight: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """``s_in * s_w`` (float32), broadcastable to the bias, and its shape."""
        # A weight has two axes or more. Out of a Function, MegEngine gives one number as a vector of one.
        shape = self.shape if weight.ndim > 1 else ()
        if self.factor != 1.0:
            activation = activation * self.factor
        return (activation * weight).reshape(shape), shape

    def scale(self, activation: FakeQuant, weight: FakeQuant) -> tuple[Tensor, tuple[int, ...]]:
        """The scale that `forward` uses with these two fake quants, and its shape."""
        product, shape = self._product(activation.signed_scale(), weight.signed_scale())
        return F.maximum(F.abs(product), SMALLEST_NORMAL), shape

    def _module_info_string(self) -> str:
        return f"{self.site}, int32, {self.phase}"
