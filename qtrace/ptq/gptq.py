"""GPTQ: rounds the weights of a layer one input after the other, each making up for the errors before it.

The error of a layer's output is ``(w - w~) H (w - w~)`` for each row w of its weight, with ``H = X X^T`` of
what the layer reads. Rounding to nearest minimises it only where H is diagonal. Here the columns are rounded
in turn, and what a rounding costs is taken back by the columns that are still free, as far as H says that
they can (Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", section 3, after Hassibi and Stork 1993, "Optimal Brain Surgeon"): with U the upper Cholesky
factor of the inverse of H, rounding column i to q moves the columns j > i by ``-(w_i - q) U_ij / U_ii``.
Nothing is learned: it costs a pass over the data and a factorisation for each layer. Layers are taken in the
order of the graph, each on inputs from the quantized layers before it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from tqdm import tqdm

from qtrace.config.base import Float, Int
from qtrace.graph.walk import get_module
from qtrace.ptq._layers import Layer, Twins, layers, write
from qtrace.ptq._second_order import correlations, nearest, rounded
from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, Noise, Report, SiteError

__all__ = ["Gptq"]


class Gptq(CalibratedAlgorithm):
    """Chooses the roundings of each layer's weights by what the layer reads; scales stay.

    Attributes:
        damp: what is added to the diagonal of H, as a share of its mean: how little correlations are trusted.
        places: at most so many places of each sample's map are counted, spread evenly.
    """

    after: ClassVar[tuple[str, ...]] = ("output_cosine",)
    instead_of: ClassVar[tuple[str, ...]] = ("adaround", "reconstruct")
    reason: ClassVar[str] = "roundings are chosen once, with scales that stay"

    damp: Annotated[Float, Field(gt=0)] = 0.01
    places: Annotated[Int, Field(ge=1)] = 256

    def apply(self, task: CalibratedTask) -> Report:
        found, left = layers(task.model)
        twins = Twins(task)
        changed, errors = [], []
        for layer in tqdm(found, desc="gptq", unit="layer", disable=not task.progress):
            if layer.call.kind not in ("conv2d", "linear"):
                left.append(f"{layer.name}: {layer.call.kind} is not supported")
                continue
            error, moved = self._round(task, twins, layer)
            errors.append(error)
            if moved:
                changed.append(f"{layer.name}: {moved} weights are not rounded to nearest")
            else:
                left.append(f"{layer.name}: rounding to nearest is better")
        if not found and not left:
            left.append("no layer has quantized weights")
        return Report(tuple(changed), tuple(left), tuple(errors))

    def _round(self, task: CalibratedTask, twins: Twins, layer: Layer) -> tuple[SiteError, int]:
        """Rounds one layer, if that helps; returns its error, and how many weights went another way."""
        twins.advance(layer.call.expr)
        before = _noise(twins, layer)
        weight = get_module(task.model, layer.weight).numpy().astype(np.float64)
        source, hessian = layer.call.inputs[0], np.zeros(1)
        for batch in range(twins.count):
            read = twins.read(source, batch)
            hessian = hessian + correlations(read, layer.call, weight.shape, self.places)
        rows = weight.reshape(len(hessian), -1, hessian.shape[-1])
        qparams = layer.quant.qparams()
        scale, zero = (
            np.broadcast_to(part.astype(np.float64).reshape(-1, 1), (rows.shape[0] * rows.shape[1], 1))
            for part in (qparams.scale, qparams.zero_point)
        )
        new, near = np.empty_like(rows), nearest(rows.reshape(len(scale), -1), scale, zero, qparams)
        for group, part in enumerate(rows):
            own = slice(group * len(part), (group + 1) * len(part))
            new[group] = rounded(part, hessian[group], scale[own], zero[own], qparams, self.damp)
        write(task.model, layer.weight, new.reshape(weight.shape))
        twins.quantized.changed()
        after = _noise(twins, layer)
        if after.noise < before.noise:
            differ = np.abs(new.reshape(near.shape) - near) > 0.5 * scale
            return SiteError(layer.name, before.decibels, after.decibels), int(differ.sum())
        write(task.model, layer.weight, weight)
        twins.quantized.changed()
        return SiteError(layer.name, before.decibels, before.decibels), 0


def _noise(twins: Twins, layer: Layer) -> Noise:
    """The error of a layer's output, but for the means of its channels, which its bias can correct."""
    noise = Noise(layer.name)
    for want, have in twins.outputs(layer.call.expr):
        rest = tuple(axis for axis in range(want.ndim) if axis != layer.axis % want.ndim)
        noise.add(want, have + (want - have).mean(axis=rest, keepdims=True))
    return noise
