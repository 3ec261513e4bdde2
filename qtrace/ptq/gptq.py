"""GPTQ: rounds the weights of a layer input by input, and compensates each error in the inputs that follow.

The error of a layer's output is ``(w - w~) H (w - w~)`` for each row w of its weight, with ``H = X X^T`` of
its inputs. Rounding to nearest minimizes it only if H is diagonal. GPTQ rounds the columns in turn and
adjusts the columns that are still free to compensate the error (Frantar et al. 2022, "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers", section 3, after Hassibi and Stork 1993,
"Optimal Brain Surgeon"): with U the upper Cholesky factor of the inverse of H, rounding column i to q moves
the columns j > i by ``-(w_i - q) U_ij / U_ii``. Nothing is learned: each layer costs a pass over the data and
a factorization. Layers are rounded in graph order, each on inputs from the quantized layers before it. A
layer that is called several times, as the head of a detector is for each level, is rounded once, by the sum
of H over its calls.

With `refit` the weights are first fitted to these inputs, see `qtrace.ptq.layers.refit`.
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
from qtrace.ptq.layers.quantized import LayerTwins, QuantizedLayer, mean_error, quantized_layers, write
from qtrace.ptq.layers.refit import correction
from qtrace.ptq.layers.second_order import SecondMoments, added, grouped, moments, nearest, rounded, spacing
from qtrace.scheme import QParams

__all__ = ["Gptq"]


class Gptq(CalibratedAlgorithm):
    """Chooses the roundings of each layer's weights by the second moments of its inputs; scales stay.

    Attributes:
        damp: the damping that is added to the diagonal of H, as a share of its mean.
        places: the most positions of each sample's feature map that count, evenly spread.
        refit: whether weights and existing biases are first fitted to the inputs of the quantized layer.
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
        quantized, left = quantized_layers(task.model, shared=True)
        twins = LayerTwins(task, quantized)
        changed, errors = [], []
        for layer in tqdm(quantized, desc="gptq", unit="layer", disable=not task.progress):
            supported = layer.call.kind in ("conv2d", "linear")
            if not supported:
                left.append(Left(layer.title, f"weights of {layer.call.kind} are rounded to nearest"))
            if not supported and (not self.refit or layer.bias is None):
                continue
            error, change = (self._round if supported else _center)(task, twins, layer)
            errors.append(error)
            if change:
                changed.append(f"{layer.title}: {change}")
            else:
                left.append(Left(layer.title, "rounding to nearest is better"))
        if not quantized and not left:
            left.append(Left("", "no layer has quantized weights"))
        return Report(tuple(changed), tuple(left), tuple(errors))

    def _round(self, task: CalibratedTask, twins: LayerTwins, layer: QuantizedLayer) -> tuple[SiteNoise, str]:
        """Rounds one layer if that lowers its error; returns the error and a clause on the change, or ""."""
        twins.advance(layer.call.expr)
        references, values = (list(side) for side in zip(*twins.results(layer), strict=True))
        before, shift_before = _errors(layer, references, values)
        weight = get_module(task.model, layer.weight).numpy().astype(np.float64)
        halves = self._halves(twins, layer, references, weight)
        total = added(*halves)
        rows = grouped(weight)
        grid = _grid(layer, rows)
        near = nearest(rows.reshape(-1, rows.shape[-1]), *grid).reshape(rows.shape)
        damping = None
        if self.refit and len(total) == 1:
            change, damping = correction(halves[0][0], halves[1][0])
            rows = rows + change.transpose(0, 2, 1)
        new = np.empty_like(rows)
        scale, zero_point, qparams = grid
        for group, part in enumerate(rows):
            members = slice(group * len(part), (group + 1) * len(part))
            hessians = [m.square[group] for m in total]
            new[group] = rounded(part, hessians, scale[members], zero_point[members], qparams, self.damp)
        write(task.model, layer.weight, new.reshape(weight.shape))
        twins.quantized.changed()
        after, shift = _errors(layer, references, [value for _, value in twins.results(layer)])
        differ = np.abs(new - near).reshape(len(scale), -1) > 0.5 * scale
        description = f"{int(differ.sum())} weights are not rounded to nearest"
        if damping is not None:
            description += f", fitted to what is read with damping {damping:g}"
        if not after.noise < before.noise:
            write(task.model, layer.weight, weight)
            after, shift, description = before, shift_before, ""
        if self.refit and layer.bias is not None:
            move_bias(task.model, layer, shift)
            description = description or "its bias takes the mean error; rounding to nearest is better"
        twins.quantized.changed()
        return SiteNoise(layer.name, before.decibels, after.decibels), description

    def _halves(
        self, twins: LayerTwins, layer: QuantizedLayer, references: list[np.ndarray], weight: np.ndarray
    ) -> list[list[SecondMoments]]:
        """Computes the moments of both halves of the samples, about the means if a bias takes these."""
        halves: list[list[SecondMoments]] = [[], []]
        for number, call in enumerate(layer.calls):
            inputs = [twins.read(call.inputs[0], batch) for batch in range(twins.count)]
            outputs = references[number * twins.count : (number + 1) * twins.count]
            if len(inputs) == 1 and len(inputs[0]) > 1:
                inputs, outputs = np.array_split(inputs[0], 2), np.array_split(outputs[0], 2)
            for i, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
                sums, half = moments(x, y, call, weight, self.places), 2 * i // len(inputs)
                if len(layer.calls) > 1:  # a position of a large map stands for more than one of a small map
                    sums = [spacing(y, call, self.places) * m for m in sums]
                halves[half] = added(halves[half], sums)
        halves[1] = halves[1] or [0 * m for m in halves[0]]  # of a single sample
        centered = self.refit and layer.bias is not None
        return [[m.centered() if centered else m for m in half] for half in halves]


def _center(task: CalibratedTask, twins: LayerTwins, layer: QuantizedLayer) -> tuple[SiteNoise, str]:
    """Corrects the bias and leaves the weights; the error does not count the means of channels."""
    twins.advance(layer.call.expr)
    references, values = (list(side) for side in zip(*twins.results(layer), strict=True))
    noise, shift = _errors(layer, references, values)
    move_bias(task.model, layer, shift)
    twins.quantized.changed()
    return SiteNoise(layer.name, noise.decibels, noise.decibels), "its bias takes the mean error"


def _grid(layer: QuantizedLayer, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, QParams]:
    """Returns scale and zero point of each row of (G, O, D), both (G * O, 1), and their parameters."""
    qparams = layer.quant.qparams()
    scale, zero_point = (
        np.broadcast_to(part.astype(np.float64).reshape(-1, 1), (rows.shape[0] * rows.shape[1], 1))
        for part in (qparams.scale, qparams.zero_point)
    )
    return scale, zero_point, qparams


def _errors(
    layer: QuantizedLayer, references: list[np.ndarray], values: list[np.ndarray]
) -> tuple[Noise, np.ndarray]:
    """Returns the error of a layer's output without the mean error of its channels (C,), and that mean."""
    noise, shift = Noise(layer.name), mean_error(zip(references, values, strict=True), layer.axis)
    mean = np.moveaxis(shift.reshape(-1, *[1] * (references[0].ndim - 1)), 0, layer.axis)
    for reference, value in zip(references, values, strict=True):
        noise.add(reference, value + mean)
    return noise, shift
