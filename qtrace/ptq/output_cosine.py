"""EasyQuant's search for weight scales that maximize the cosine of the layer's float and quantized output.

Wu et al. 2020, "EasyQuant: Post-training Quantization via Scale Optimization", section 3: several multiples
of the calibrated weight scale are tried, and the one with the largest cosine is chosen. Layers are searched
in graph order, each on inputs from the quantized layers before it. A channel's output depends on its own
scale only, so that all channels of a layer are searched at once.

The paper goes on to the scale of the activation and repeats. Here activations keep the range of their
observer (the observer ``cosine`` maximizes the cosine of the tensor itself).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from qtrace.display import progress_bar
from qtrace.plugins.options import Int
from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, Left, Noise, Report, SiteNoise
from qtrace.ptq.layers.quantized import LayerTwins, QuantizedLayer, per_channel, quantized_layers
from qtrace.scheme import QParams

__all__ = ["OutputCosine"]

# The range of the multiples; a bias leaves a factor of two to the limit of int32.
_MIN_MULTIPLE, _MAX_MULTIPLE = 0.5, 1.2


class OutputCosine(CalibratedAlgorithm):
    """Chooses weight scales by the cosine of the layer's output on calibration data.

    Attributes:
        candidates: number of multiples of the calibrated scale, from 0.5 to 1.2.
    """

    candidates: Annotated[Int, Field(ge=2, le=200)] = 24

    def apply(self, task: CalibratedTask) -> Report:
        quantized, left = quantized_layers(task.model)
        twins = LayerTwins(task)
        changed, errors = [], []
        for layer in progress_bar(quantized, desc="output_cosine", unit="layer", disable=not task.progress):
            reason = _reason_against(layer)
            if reason:
                left.append(Left(layer.name, reason))
                continue
            error, line = _choose(twins, layer, self.candidates)
            errors.append(error)
            changed.extend([line] if line else [])
        return Report(tuple(changed), tuple(left), tuple(errors))


def _reason_against(layer: QuantizedLayer) -> str:
    """Returns why the scales of a layer cannot be searched; "" if they can."""
    scales, channels = int(np.prod(layer.quant.shape)), int(layer.call.out.shape[layer.axis])
    return "" if scales in (1, channels) else f"it has {scales} scales for {channels} channels"


def _choose(twins: LayerTwins, layer: QuantizedLayer, candidates: int) -> tuple[SiteNoise, str]:
    """Chooses the scales of one layer; returns its error, and a line for the report or ""."""
    expr = layer.call.expr
    twins.advance(expr)
    start = layer.quant.qparams()
    if start.scheme.power_of_two:
        multiples = np.array([1.0, 0.5])
    else:
        multiples = np.concatenate([[1.0], np.linspace(_MIN_MULTIPLE, _MAX_MULTIPLE, candidates)])
    scores = []
    for multiple in multiples:
        _rescale(twins, layer, start, np.asarray(multiple))
        scores.append(_cosines(twins, layer, whole=start.scale.ndim == 0))
    # In a tie the first wins, which is the calibrated scale.
    best = multiples[np.argmax(np.stack(scores), axis=0)]
    before, after = Noise(layer.name), Noise(layer.name)
    for noise, multiple in ((before, np.asarray(1.0)), (after, best)):
        _rescale(twins, layer, start, multiple)
        for reference, value in twins.outputs(expr):
            noise.add(reference, value)
    changed = int(np.count_nonzero(best != 1.0))
    line = f"{layer.name}: {changed} of {best.size} scales times {best.min():.3g} to {best.max():.3g}"
    return SiteNoise(layer.name, before.decibels, after.decibels), line if changed else ""


def _rescale(twins: LayerTwins, layer: QuantizedLayer, start: QParams, multiple: np.ndarray) -> None:
    """Sets the scales to ``multiple``, of shape () or (C,), times the calibrated ones."""
    scale = (start.scale.astype(np.float64) * multiple).astype(np.float32)
    layer.quant.set_qparams(QParams(start.scheme, scale, start.zero_point))
    twins.quantized.changed()


def _cosines(twins: LayerTwins, layer: QuantizedLayer, whole: bool) -> np.ndarray:
    """Returns the cosine of every channel, float64 (C,), or of the whole output, float64 ()."""
    sums = [np.zeros(1)] * 3
    for pair in twins.outputs(layer.call.expr):
        a, b = (per_channel(value.astype(np.float64), layer.axis) for value in pair)
        pairs = ((a, b), (a, a), (b, b))
        sums = [total + (x * y).sum(axis=1) for total, (x, y) in zip(sums, pairs, strict=True)]
    dot, one, other = (total.sum() if whole else total for total in sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = dot / np.sqrt(one * other)
    return np.where(np.isfinite(cosine), cosine, -1.0)
