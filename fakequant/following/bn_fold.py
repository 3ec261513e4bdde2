"""A layer and the BatchNorm after it, while the BatchNorm still trains.

In training the layer runs on fake-quantized raw weights, and the BatchNorm normalises by the batch. In
evaluation both are one layer with folded weights ``w * g`` at scales ``s * |g|`` (the same integers, up to
the sign of g). So ``convert`` writes it, and a runtime computes it. A channel gets a larger scale if its g is
close to 0 compared with other channels, or if its bias would not fit into int32 at the product of the scales.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import megengine.functional as F
from megengine import Tensor
from megengine.module import Module

from qtrace.fakequant.base import FakeQuant, builtin
from qtrace.fakequant.following.bias import BIAS_LIMIT, BiasQuant
from qtrace.fakequant.kernels import Levels, quant_dequant
from qtrace.gradients import conv2d
from qtrace.numerics import SMALLEST_SCALE, SMALLEST_SHARE

__all__ = ["LAYERS", "BnFold", "BnFoldCall"]

LAYERS = {"conv2d": conv2d, "conv_transpose2d": F.conv_transpose2d, "linear": F.linear}


class BnFoldCall(NamedTuple):
    """The nodes of one call of a `BnFold` in a graph: ``BnFoldCall(*expr.args)``.

    Attributes:
        module: the node of the `BnFold`.
        x, weight, bias, norm, weight_quant, source: the nodes of arguments of `BnFold.forward`; None for a
            missing bias or source.
    """

    module: Any
    x: Any
    weight: Any
    bias: Any
    norm: Any
    weight_quant: Any
    source: Any


@builtin
class BnFold(Module):
    """Computes ``bn(layer(x))``, folded in evaluation.

    Args:
        site: the name of the layer's output.
        kind: ``conv2d``, ``conv_transpose2d`` or ``linear``.
        options: keyword arguments of the layer's function (stride, padding, ...).
        bias_shape: shape of the layer's bias.
    """

    def __init__(self, site: str, kind: str, options: dict[str, Any], bias_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.site, self.kind, self.phase = site, kind, "float"
        self.options = dict(options)
        self.bias_shape = tuple(bias_shape)
        self.bias_quant = BiasQuant(f"{site}_bias", self.bias_shape)

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, bn: Module, weight_quant: FakeQuant, source: Any
    ) -> Tensor:
        """Runs the layer and its BatchNorm.

        Args:
            x: the layer's input.
            weight: the layer's raw weight.
            bias: the layer's raw bias, or None.
            bn: the BatchNorm; its ``training`` chooses between batch statistics and folding.
            weight_quant: the fake quant of the weight.
            source: the fake quant of the input, or None when the input is float.
        """
        layer = LAYERS[self.kind]
        if bn.training or self.phase in ("float", "observe"):
            return bn(layer(x, weight_quant(weight), bias, **self.options))
        folded_weight, folded_bias, scale = self.fold(weight, bias, bn, weight_quant, source)
        levels, shape, learn = Levels.of(weight_quant.scheme), weight_quant.shape, weight_quant.learning
        quantized = quant_dequant(folded_weight, scale, weight_quant.zero_point, levels, shape, learn)
        if source is not None:
            self.bias_quant.phase = self.phase
            folded_bias = self.bias_quant.quantize(folded_bias, source.signed_scale(), scale)
        return layer(x, quantized, folded_bias, **self.options)

    def fold(
        self, weight: Tensor, bias: Tensor | None, bn: Module, weight_quant: FakeQuant, source: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the folded weight and bias in float32, and the scales of the folded weight.

        Args:
            weight: raw weight.
            bias: raw bias or None.
            bn: the BatchNorm.
            weight_quant: the fake quant of the weight.
            source: the fake quant of the input, or None when the input is float.
        """
        gain = self._gain(bn)
        shift = -bn.running_mean.reshape(-1) * gain
        if bias is not None:
            shift = shift + bias.reshape(-1) * gain
        if bn.bias is not None:
            shift = shift + bn.bias.reshape(-1)
        shape = weight_quant.shape
        gain = gain.reshape(shape)
        scale = weight_quant.effective_scale() * F.abs(gain)
        scale = F.maximum(scale, F.maximum(F.max(scale) * SMALLEST_SHARE, SMALLEST_SCALE))
        if source is not None:
            min_scale = F.abs(shift) / (source.effective_scale() * BIAS_LIMIT)
            scale = F.maximum(scale, min_scale.reshape(shape))
        return weight_quant.shaped(weight) * gain, shift.reshape(self.bias_shape), scale

    @staticmethod
    def _gain(bn: Module) -> Tensor:
        gain = 1.0 / F.sqrt(bn.running_var.reshape(-1) + bn.eps)
        return gain if bn.weight is None else gain * bn.weight.reshape(-1)
