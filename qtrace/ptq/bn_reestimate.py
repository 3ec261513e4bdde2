"""Re-estimates BatchNorm statistics with quantized weights.

Rounding changes mean and variance of a layer's output, while its BatchNorm still normalizes by the statistics
of the float layer. Statistics of the quantized layer restore the mean and variance of every channel that
training intended. Sources: Sun et al. 2019, "Hybrid 8-bit Floating Point Training and Inference for Deep
Neural Networks", section 3. Nagel et al. 2021, "A White Paper on Neural Network Quantization", 5.2.1.

If BatchNorm is folded, the channel is scaled instead: ``a = deviation(y) / deviation(y~)`` goes into the
scale of its weight, whose integers stay, and the bias becomes ``a * (b - mean(y~)) + mean(y)``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from megengine import Tensor

from qtrace.display import progress_bar
from qtrace.fakequant.following.bn_fold import LAYERS as FOLDED
from qtrace.fakequant.following.bn_fold import BnFold, BnFoldCall
from qtrace.graph.types import Expr
from qtrace.graph.walk import exprs, get_module, owner
from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, Left, Noise, Report, SiteNoise
from qtrace.ptq.layers.quantized import (
    KEPT_NORM,
    LayerTwins,
    QuantizedLayer,
    per_channel,
    quantized_layers,
    write,
)
from qtrace.scheme import QParams

__all__ = ["BnReestimate"]


class BnReestimate(CalibratedAlgorithm):
    """Re-estimates kept BatchNorms, and scales the channels of layers with a folded one."""

    after: ClassVar[tuple[str, ...]] = ("output_cosine", "adaround", "reconstruct", "gptq")
    reason: ClassVar[str] = "bn_reestimate measures what the roundings leave, once these are chosen"

    def apply(self, task: CalibratedTask) -> Report:
        quantized, left = quantized_layers(task.model)
        left = [item for item in left if item.reason != KEPT_NORM]
        by_expr = {layer.call.expr: layer for layer in quantized}
        twins = LayerTwins(task)
        changed, errors = [], []
        for expr in progress_bar(
            exprs(task.model), desc="bn_reestimate", unit="op", disable=not task.progress
        ):
            name = expr.outputs[0].name if expr.outputs else ""
            if isinstance(owner(expr), BnFold):
                errors.append(_reestimate(twins, expr))
                changed.append(f"{name}: mean and variance estimated anew")
            elif expr in by_expr:
                result = _rescale(task, twins, by_expr[expr])
                if isinstance(result, str):
                    left.append(Left(name, result))
                else:
                    errors.append(result)
                    changed.append(f"{name}: channels scaled and moved")
        if not quantized and not changed:
            left.append(Left("", "no layer has quantized weights"))
        return Report(tuple(changed), tuple(left), tuple(errors))


def _noise(twins: LayerTwins, expr: Expr) -> Noise:
    noise = Noise(expr.outputs[0].name)
    for reference, value in twins.outputs(expr):
        noise.add(reference, value)
    return noise


class _ChannelMoments:
    """Mean and variance of channels, summed over batches."""

    def __init__(self) -> None:
        self.count, self.sum, self.squares = 0, np.zeros(1), np.zeros(1)

    def add(self, rows: np.ndarray) -> None:
        """Adds values of shape (channels, values of a channel)."""
        rows = rows.astype(np.float64)
        self.count += rows.shape[1]
        self.sum = self.sum + rows.sum(axis=1)
        self.squares = self.squares + np.square(rows).sum(axis=1)

    @property
    def mean(self) -> np.ndarray:
        """The mean of each channel, shape (C,)."""
        return self.sum / self.count

    @property
    def variance(self) -> np.ndarray:
        """The biased variance of each channel, shape (C,)."""
        return np.maximum(self.squares / self.count - self.mean**2, 0.0)


def _reestimate(twins: LayerTwins, expr: Expr) -> SiteNoise:
    """Sets the statistics of a kept BatchNorm to its layer's on quantized weights and inputs."""
    twins.advance(expr)
    before = _noise(twins, expr)
    module: Any = owner(expr)
    _, x, weight, bias, norm, scales, _ = BnFoldCall(*expr.args)
    moments = _ChannelMoments()
    for batch in range(twins.count):
        value = {n: twins.quantized.value(n, batch) for n in (x, weight, bias) if n is not None}
        rounded = scales.owner.quantize_dequantize(value[weight])
        y = FOLDED[module.kind](value[x], rounded, value.get(bias), **module.options)
        moments.add(per_channel(y.numpy(), -1 if module.kind == "linear" else 1))
    bn = norm.owner
    for tensor, new in ((bn.running_mean, moments.mean), (bn.running_var, moments.variance)):
        tensor._reset(Tensor(new.reshape(tuple(int(n) for n in tensor.shape)).astype(np.float32)))
    twins.quantized.changed()
    return SiteNoise(before.site, before.decibels, _noise(twins, expr).decibels)


def _rescale(task: CalibratedTask, twins: LayerTwins, layer: QuantizedLayer) -> SiteNoise | str:
    """Scales and moves the channels of a layer; returns its error, or the reason for no change."""
    quant = layer.quant
    if layer.bias is None:
        return "it has no bias"
    if not quant.shape:
        return "its weights have one scale; bias_correction corrects only the means"
    if quant.scheme.power_of_two:
        return "its scales are powers of two"
    twins.advance(layer.call.expr)
    exact, rounded, before = _ChannelMoments(), _ChannelMoments(), Noise(layer.name)
    for reference, value in twins.outputs(layer.call.expr):
        before.add(reference, value)
        exact.add(per_channel(reference, layer.axis))
        rounded.add(per_channel(value, layer.axis))
    alive = (exact.variance > 0) & (rounded.variance > 0)
    gain = np.where(alive, np.sqrt(exact.variance / np.where(alive, rounded.variance, 1.0)), 1.0)
    weight, bias, old = (
        get_module(task.model, layer.weight).numpy().copy(),
        get_module(task.model, layer.bias).numpy().copy(),
        quant.qparams(),
    )
    in_blocks = quant.scheme.block is not None  # then each channel has several scales
    spread = gain.reshape((-1, 1) if in_blocks else quant.shape)
    scales = np.repeat(gain, quant.shape[1]) if in_blocks else gain
    scale = (old.scale * scales).astype(np.float32)
    quant.set_qparams(QParams(old.scheme, scale, old.zero_point))
    write(task.model, layer.weight, weight * spread)
    write(task.model, layer.bias, (bias.reshape(-1) - rounded.mean) * gain + exact.mean)
    twins.quantized.changed()
    after = _noise(twins, layer.call.expr)
    if after.noise < before.noise:
        return SiteNoise(layer.name, before.decibels, after.decibels)
    quant.set_qparams(old)
    write(task.model, layer.weight, weight)
    write(task.model, layer.bias, bias)
    twins.quantized.changed()
    return "the error of its output would grow"
