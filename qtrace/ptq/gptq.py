"""GPTQ: rounds the weights of a layer one input after the other, each making up for the errors before it.

The error of a layer's output is ``(w - w~) H (w - w~)`` for each row w of its weight, with ``H = X X^T`` of
what the layer reads. Rounding to nearest minimises it only where H is diagonal. Here the columns are rounded
in turn, and what a rounding costs is taken back by the columns that are still free, as far as H says that
they can (Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", section 3, after Hassibi and Stork 1993, "Optimal Brain Surgeon"): with U the upper Cholesky
factor of the inverse of H, rounding column i to q moves the columns j > i by ``-(w_i - q) U_ij / U_ii``.
Nothing is learned: it costs a pass over the data and a factorisation for each layer. Layers are taken in the
order of the graph, each on inputs from the quantized layers before it. A layer that is called several times,
as the head of a detector is for each level, is rounded once, by the sum of H over its calls.

With `refit` the weights are first fitted to those inputs, see `qtrace.ptq.layers.refit`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from tqdm import tqdm

from qtrace.graph.walk import get_module
from qtrace.plugins.options import Float, Int
from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, FloatTask, Left, Noise, Report, SiteNoise
from qtrace.ptq.layers.biases import add_biases, move_bias
from qtrace.ptq.layers.quantized import Layer, Twins, layers, mean_error, write
from qtrace.ptq.layers.refit import correction
from qtrace.ptq.layers.second_order import Moments, added, grouped, moments, nearest, rounded, spacing
from qtrace.scheme import QParams

__all__ = ["Gptq"]


class Gptq(CalibratedAlgorithm):
    """Chooses the roundings of each layer's weights by what the layer reads; scales stay.

    Attributes:
        damp: what is added to the diagonal of H, as a share of its mean: how little correlations are trusted.
        places: at most so many places of each sample's map are counted, spread evenly.
        refit: whether weights, and biases that there are, are fitted first to what the quantized layer reads.
    """

    after: ClassVar[tuple[str, ...]] = ("output_cosine",)
    instead_of: ClassVar[tuple[str, ...]] = ("adaround", "reconstruct")
    reason: ClassVar[str] = "roundings are chosen once, with scales that stay"

    damp: Annotated[Float, Field(gt=0)] = 0.01
    places: Annotated[Int, Field(ge=1)] = 256
    refit: bool = False

    def ready(self, task: FloatTask) -> None:
        if self.refit:
            add_biases(task.model)

    def apply(self, task: CalibratedTask) -> Report:
        found, left = layers(task.model, shared=True)
        twins = Twins(task, found)
        changed, errors = [], []
        for layer in tqdm(found, desc="gptq", unit="layer", disable=not task.progress):
            supported = layer.call.kind in ("conv2d", "linear")
            if not supported:
                left.append(Left(layer.title, f"weights of {layer.call.kind} are rounded to nearest"))
            if not supported and (not self.refit or layer.bias is None):
                continue
            error, told = (self._round if supported else _center)(task, twins, layer)
            errors.append(error)
            if told:
                changed.append(f"{layer.title}: {told}")
            else:
                left.append(Left(layer.title, "rounding to nearest is better"))
        if not found and not left:
            left.append(Left("", "no layer has quantized weights"))
        return Report(tuple(changed), tuple(left), tuple(errors))

    def _round(self, task: CalibratedTask, twins: Twins, layer: Layer) -> tuple[SiteNoise, str]:
        """Rounds one layer, if that helps; returns its error, and what was changed."""
        twins.advance(layer.call.expr)
        want, have = (list(values) for values in zip(*twins.results(layer), strict=True))
        before, lost = _errors(layer, want, have)
        weight = get_module(task.model, layer.weight).numpy().astype(np.float64)
        halves = self._halves(twins, layer, want, weight)
        total = added(*halves)
        rows = grouped(weight)
        grid = _grid(layer, rows)
        near = nearest(rows.reshape(-1, rows.shape[-1]), *grid).reshape(rows.shape)
        damping = None
        if self.refit and len(total) == 1:
            moved, damping = correction(halves[0][0], halves[1][0])
            rows = rows + moved.transpose(0, 2, 1)
        new = np.empty_like(rows)
        scale, zero, qparams = grid
        for group, part in enumerate(rows):
            own = slice(group * len(part), (group + 1) * len(part))
            hessians = [m.square[group] for m in total]
            new[group] = rounded(part, hessians, scale[own], zero[own], qparams, self.damp)
        write(task.model, layer.weight, new.reshape(weight.shape))
        twins.quantized.changed()
        tried = [got for _, got in twins.results(layer)]
        after, lacking = _errors(layer, want, tried)
        differ = np.abs(new - near).reshape(len(scale), -1) > 0.5 * scale
        told = f"{int(differ.sum())} weights are not rounded to nearest"
        if damping is not None:
            told += f", fitted to what is read with damping {damping:g}"
        if not after.noise < before.noise:
            write(task.model, layer.weight, weight)
            after, lacking, told = before, lost, ""
        if self.refit and layer.bias is not None:
            move_bias(task.model, layer, lacking)
            told = told or "its bias takes the mean error; rounding to nearest is better"
        twins.quantized.changed()
        return SiteNoise(layer.name, before.decibels, after.decibels), told

    def _halves(
        self, twins: Twins, layer: Layer, want: list[np.ndarray], weight: np.ndarray
    ) -> list[list[Moments]]:
        """The moments of both halves of the samples; about the means where a bias takes these."""
        halves: list[list[Moments]] = [[], []]
        for number, call in enumerate(layer.calls):
            reads = [twins.read(call.inputs[0], batch) for batch in range(twins.count)]
            wanted = want[number * twins.count : (number + 1) * twins.count]
            if len(reads) == 1 and len(reads[0]) > 1:
                reads, wanted = np.array_split(reads[0], 2), np.array_split(wanted[0], 2)
            for i, (x, y) in enumerate(zip(reads, wanted, strict=True)):
                found, half = moments(x, y, call, weight, self.places), 2 * i // len(reads)
                if len(layer.calls) > 1:  # a place of a large map stands for more than one of a small map
                    found = [spacing(y, call, self.places) * m for m in found]
                halves[half] = added(halves[half], found)
        halves[1] = halves[1] or [0 * m for m in halves[0]]  # of a single sample
        centered = self.refit and layer.bias is not None
        return [[m.centered() if centered else m for m in half] for half in halves]


def _center(task: CalibratedTask, twins: Twins, layer: Layer) -> tuple[SiteNoise, str]:
    """Leaves the weights and corrects the bias; the error that counts elsewhere is that without the means."""
    twins.advance(layer.call.expr)
    want, have = (list(values) for values in zip(*twins.results(layer), strict=True))
    noise, lacking = _errors(layer, want, have)
    move_bias(task.model, layer, lacking)
    twins.quantized.changed()
    return SiteNoise(layer.name, noise.decibels, noise.decibels), "its bias takes the mean error"


def _grid(layer: Layer, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, QParams]:
    """Scale and zero point of each row (G, O, D), both (G * O, 1), and whose they are."""
    qparams = layer.quant.qparams()
    scale, zero = (
        np.broadcast_to(part.astype(np.float64).reshape(-1, 1), (rows.shape[0] * rows.shape[1], 1))
        for part in (qparams.scale, qparams.zero_point)
    )
    return scale, zero, qparams


def _errors(layer: Layer, want: list[np.ndarray], have: list[np.ndarray]) -> tuple[Noise, np.ndarray]:
    """The error of a layer's output but for the means of its channels, and these, which its bias can take."""
    noise, lacking = Noise(layer.name), mean_error(zip(want, have, strict=True), layer.axis)
    mean = np.moveaxis(lacking.reshape(-1, *[1] * (want[0].ndim - 1)), 0, layer.axis)
    for wanted, got in zip(want, have, strict=True):
        noise.add(wanted, got + mean)
    return noise, lacking
