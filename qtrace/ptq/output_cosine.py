"""EasyQuant's search: the weight scales whose layer outputs point the way of the float ones.

Wu et al. 2020, "EasyQuant: Post-training Quantization via Scale Optimization", section 3: the scale of a
layer's weight is tried at several multiples of the calibrated one, and the largest cosine between the layer's
output in float and quantized wins. Layers are taken in the order of the graph, each on inputs from the
quantized layers before it. A channel's output depends on no scale but its own, so that all channels of a
layer are searched at once, each for its own best.

The paper goes on to the scale of the activation and repeats; here activations keep what their observer chose
(the observer ``cosine`` maximises the cosine of the tensor itself).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from tqdm import tqdm

from qtrace.plugins.options import Int
from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, Left, Noise, Report, SiteNoise
from qtrace.ptq.layers.quantized import Layer, Twins, layers, per_channel
from qtrace.scheme import QParams

__all__ = ["OutputCosine"]

# The multiples that are tried; a bias leaves a factor of two to what int32 holds.
_LEAST, _MOST = 0.5, 1.2


class OutputCosine(CalibratedAlgorithm):
    """Chooses weight scales by the cosine of the layer's output on calibration data.

    Attributes:
        candidates: how many multiples of the calibrated scale are tried, from 0.5 to 1.2.
    """

    candidates: Annotated[Int, Field(ge=2, le=200)] = 24

    def apply(self, task: CalibratedTask) -> Report:
        found, left = layers(task.model)
        twins = Twins(task)
        changed, errors = [], []
        for layer in tqdm(found, desc="output_cosine", unit="layer", disable=not task.progress):
            reason = _unfit(layer)
            if reason:
                left.append(Left(layer.name, reason))
                continue
            error, moved = _choose(twins, layer, self.candidates)
            errors.append(error)
            changed.extend([moved] if moved else [])
        return Report(tuple(changed), tuple(left), tuple(errors))


def _unfit(layer: Layer) -> str:
    """Why the scales of a layer cannot be searched; nothing when they can."""
    scales, channels = int(np.prod(layer.quant.shape)), int(layer.call.out.shape[layer.axis])
    return "" if scales in (1, channels) else f"it has {scales} scales for {channels} channels"


def _choose(twins: Twins, layer: Layer, candidates: int) -> tuple[SiteNoise, str]:
    """Chooses the scales of one layer; returns its error, and a line about what changed."""
    expr = layer.call.expr
    twins.advance(expr)
    start = layer.quant.qparams()
    if start.scheme.power_of_two:
        multiples = np.array([1.0, 0.5])
    else:
        multiples = np.concatenate([[1.0], np.linspace(_LEAST, _MOST, candidates)])
    scores = []
    for multiple in multiples:
        _rescale(twins, layer, start, np.asarray(multiple))
        scores.append(_cosines(twins, layer, whole=start.scale.ndim == 0))
    # A tie goes to the first, which is the calibrated scale.
    best = multiples[np.argmax(np.stack(scores), axis=0)]
    before, after = Noise(layer.name), Noise(layer.name)
    for noise, multiple in ((before, np.asarray(1.0)), (after, best)):
        _rescale(twins, layer, start, multiple)
        for want, have in twins.outputs(expr):
            noise.add(want, have)
    moved = int(np.count_nonzero(best != 1.0))
    line = f"{layer.name}: {moved} of {best.size} scales times {best.min():.3g} to {best.max():.3g}"
    return SiteNoise(layer.name, before.decibels, after.decibels), line if moved else ""


def _rescale(twins: Twins, layer: Layer, start: QParams, multiple: np.ndarray) -> None:
    """Sets the calibrated scales times a multiple, () or (C,)."""
    scale = (start.scale.astype(np.float64) * multiple).astype(np.float32)
    layer.quant.set_qparams(QParams(start.scheme, scale, start.zero_point))
    twins.quantized.changed()


def _cosines(twins: Twins, layer: Layer, whole: bool) -> np.ndarray:
    """The cosine of every channel of the output, or of all of it; float64 (C,) or ()."""
    sums = [np.zeros(1)] * 3
    for want, have in twins.outputs(layer.call.expr):
        a, b = (per_channel(value.astype(np.float64), layer.axis) for value in (want, have))
        pairs = ((a, b), (a, a), (b, b))
        sums = [total + (x * y).sum(axis=1) for total, (x, y) in zip(sums, pairs, strict=True)]
    dot, one, other = (total.sum() if whole else total for total in sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = dot / np.sqrt(one * other)
    return np.where(np.isfinite(cosine), cosine, -1.0)
