"""Bias correction: subtracts the mean error of each channel from its bias.

Rounding errors of weights and inputs do not cancel: ``E[y~] - E[y]`` is not 0, and each layer passes its
shift on to the next. Subtracting it from the bias removes it exactly (Nagel et al. 2019, "Data-Free
Quantization Through Weight Equalization and Bias Correction", section 4.2 and appendix D: the empirical
form). Layers are corrected in graph order, each on inputs from the quantized and corrected layers before it.
A layer that is called several times, as the head of a detector is for each level, has one bias: it takes the
mean over all calls. A part of the batches is held back and decides for each layer whether its correction
stays, see `qtrace.ptq.layers.held_back`.
"""

from __future__ import annotations

from typing import ClassVar

from qtrace.display import progress_bar
from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, FloatTask, Left, Report, SiteNoise
from qtrace.ptq.layers.held_back import held_back, layer_errors, summed
from qtrace.ptq.layers.quantized import LayerTwins, quantized_layers
from qtrace.ptq.layers.scaling import add_biases, correct_bias

__all__ = ["BiasCorrection"]


class BiasCorrection(CalibratedAlgorithm):
    """Corrects the bias of every quantized layer by the mean error of its channels on calibration data."""

    after: ClassVar[tuple[str, ...]] = ("output_cosine", "adaround", "reconstruct", "gptq", "bn_reestimate")
    reason: ClassVar[str] = "bias_correction takes away what the roundings leave, once these are chosen"

    def ready(self, task: FloatTask) -> None:
        add_biases(task.model)

    def apply(self, task: CalibratedTask) -> Report:
        quantized, left = quantized_layers(task.model, shared=True)
        twins = LayerTwins(task, quantized, fast=True)
        changed, errors = [], []
        for layer in progress_bar(quantized, desc="bias_correction", unit="layer", disable=not task.progress):
            if layer.bias is None:
                left.append(Left(layer.title, "it has no bias"))
                continue
            twins.advance(layer.call.expr)
            before = layer_errors(twins, layer)
            numbers = held_back(twins.count)
            fitted = summed(before, [number for number in before if number not in numbers]).mean
            held_errors = {number: before[number] for number in numbers}
            largest, held = correct_bias(task.model, layer, summed(before), fitted, held_errors)
            twins.quantized.changed()
            if largest is None:
                left.append(Left(layer.title, f"its bias stays: {held}"))
                after = before
            else:
                moved = f"{layer.title}: bias moved by {largest:.3g} at most"
                changed.append(f"{moved}; {held}" if held else moved)
                after = layer_errors(twins, layer)
            ratios = (sums.decibels(sums.noise()) for sums in (summed(before), summed(after)))
            errors.append(SiteNoise(layer.name, *ratios))
        if not quantized and not left:
            left.append(Left("", "no layer has quantized weights"))
        return Report(tuple(changed), tuple(left), tuple(errors))
