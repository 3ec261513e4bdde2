"""Bias correction: takes from each bias what rounding has added to the mean of its channel.

Rounding errors of weights and inputs do not cancel: ``E[y~] - E[y]`` is not 0, and each layer hands its shift
on to the next. Subtracting it from the bias removes it exactly (Nagel et al. 2019, "Data-Free Quantization
Through Weight Equalization and Bias Correction", section 4.2 and appendix D: the empirical form). Layers are
taken in the order of the graph, each on inputs that come from the quantized and corrected layers before it.
A layer that is called several times, as the head of a detector is for each level, has one bias: it takes the
mean over all calls.
"""

from __future__ import annotations

from typing import ClassVar

from tqdm import tqdm

from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, FloatTask, Left, Noise, Report, SiteNoise
from qtrace.ptq.layers.biases import add_biases, move_bias
from qtrace.ptq.layers.quantized import Layer, Twins, layers, mean_error

__all__ = ["BiasCorrection"]


class BiasCorrection(CalibratedAlgorithm):
    """Corrects the bias of every quantized layer by the mean error of its channels on calibration data."""

    after: ClassVar[tuple[str, ...]] = ("output_cosine", "adaround", "reconstruct", "gptq", "bn_reestimate")
    reason: ClassVar[str] = "bias_correction takes away what the roundings leave, once these are chosen"

    def ready(self, task: FloatTask) -> None:
        add_biases(task.model)

    def apply(self, task: CalibratedTask) -> Report:
        found, left = layers(task.model, shared=True)
        twins = Twins(task, found)
        changed, errors = [], []
        for layer in tqdm(found, desc="bias_correction", unit="layer", disable=not task.progress):
            if layer.bias is None:
                left.append(Left(layer.title, "it has no bias"))
                continue
            error, largest = _correct(task, twins, layer)
            errors.append(error)
            changed.append(f"{layer.title}: bias moved by {largest:.3g} at most")
        if not found and not left:
            left.append(Left("", "no layer has quantized weights"))
        return Report(tuple(changed), tuple(left), tuple(errors))


def _correct(task: CalibratedTask, twins: Twins, layer: Layer) -> tuple[SiteNoise, float]:
    """Corrects one layer; returns its error and the largest correction."""
    twins.advance(layer.call.expr)
    before, after = Noise(layer.name), Noise(layer.name)
    pairs = list(twins.results(layer))
    for want, have in pairs:
        before.add(want, have)
    largest = move_bias(task.model, layer, mean_error(pairs, layer.axis))
    twins.quantized.changed()
    for want, have in twins.results(layer):
        after.add(want, have)
    return SiteNoise(layer.name, before.decibels, after.decibels), largest
