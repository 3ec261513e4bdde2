"""Bias correction: subtracts the mean error of each channel from its bias.

Rounding errors of weights and inputs do not cancel: ``E[y~] - E[y]`` is not 0, and each layer passes its
shift on to the next. Subtracting it from the bias removes it exactly (Nagel et al. 2019, "Data-Free
Quantization Through Weight Equalization and Bias Correction", section 4.2 and appendix D: the empirical
form). Layers are corrected in graph order, each on inputs from the quantized and corrected layers before it.
A layer that is called several times, as the head of a detector is for each level, has one bias: it takes the
mean over all calls.
"""

from __future__ import annotations

from typing import ClassVar

from tqdm import tqdm

from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, FloatTask, Left, Noise, Report, SiteNoise
from qtrace.ptq.layers.biases import add_biases, move_bias
from qtrace.ptq.layers.quantized import LayerTwins, QuantizedLayer, mean_error, quantized_layers

__all__ = ["BiasCorrection"]


class BiasCorrection(CalibratedAlgorithm):
    """Corrects the bias of every quantized layer by the mean error of its channels on calibration data."""

    after: ClassVar[tuple[str, ...]] = ("output_cosine", "adaround", "reconstruct", "gptq", "bn_reestimate")
    reason: ClassVar[str] = "bias_correction takes away what the roundings leave, once these are chosen"

    def ready(self, task: FloatTask) -> None:
        add_biases(task.model)

    def apply(self, task: CalibratedTask) -> Report:
        quantized, left = quantized_layers(task.model, shared=True)
        twins = LayerTwins(task, quantized)
        changed, errors = [], []
        for layer in tqdm(quantized, desc="bias_correction", unit="layer", disable=not task.progress):
            if layer.bias is None:
                left.append(Left(layer.title, "it has no bias"))
                continue
            error, largest = _correct(task, twins, layer)
            errors.append(error)
            changed.append(f"{layer.title}: bias moved by {largest:.3g} at most")
        if not quantized and not left:
            left.append(Left("", "no layer has quantized weights"))
        return Report(tuple(changed), tuple(left), tuple(errors))


def _correct(task: CalibratedTask, twins: LayerTwins, layer: QuantizedLayer) -> tuple[SiteNoise, float]:
    """Corrects one layer; returns its error and the largest correction."""
    twins.advance(layer.call.expr)
    before, after = Noise(layer.name), Noise(layer.name)
    pairs = list(twins.results(layer))
    for reference, value in pairs:
        before.add(reference, value)
    largest = move_bias(task.model, layer, mean_error(pairs, layer.axis))
    twins.quantized.changed()
    for reference, value in twins.results(layer):
        after.add(reference, value)
    return SiteNoise(layer.name, before.decibels, after.decibels), largest
