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

With `refit` the weights are first fitted to these inputs, see `qtrace.ptq.layers.refit`. A part of the
batches is held back and decides for each layer whether its new weights and its new bias stay, see
`qtrace.ptq.layers.held_back`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from qtrace.display import progress_bar
from qtrace.graph.walk import get_module
from qtrace.ops import OpCall
from qtrace.plugins.options import Float, Int
from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, FloatTask, Left, Report, SiteNoise
from qtrace.ptq.layers.biases import add_biases, correct_bias
from qtrace.ptq.layers.held_back import OutputErrors, gain_text, held_back, layer_errors, summed
from qtrace.ptq.layers.quantized import LayerTwins, QuantizedLayer, quantized_layers, write
from qtrace.ptq.layers.refit import correction, ridge
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
        twins = LayerTwins(task, quantized, fast=True)
        changed, errors = [], []
        for layer in progress_bar(quantized, desc="gptq", unit="layer", disable=not task.progress):
            supported = layer.call.kind in ("conv2d", "linear")
            if not supported:
                left.append(Left(layer.title, f"weights of {layer.call.kind} are rounded to nearest"))
            if not supported and (not self.refit or layer.bias is None):
                continue
            twins.advance(layer.call.expr)
            before: Mapping[int, OutputErrors] = layer_errors(twins, layer)
            after, change, reason = before, "", ""
            if supported:
                after, change, reason = _LayerRounding(self, twins, layer, before).run()
            if self.refit and layer.bias is not None:
                moved, held = correct_bias(twins, layer, after)
                change = _with_bias(change, reason, moved is not None, held)
            sums = (summed(before), summed(after))
            errors.append(SiteNoise(layer.name, *(s.decibels(s.centered_noise) for s in sums)))
            if change:
                changed.append(f"{layer.title}: {change}")
            else:
                left.append(Left(layer.title, reason or f"its bias stays: {held}"))
        if not quantized and not left:
            left.append(Left("", "no layer has quantized weights"))
        return Report(tuple(changed), tuple(left), tuple(errors))


def _with_bias(change: str, reason: str, moved: bool, held: str) -> str:
    """Completes the clause on a layer's change, which has a bias.

    Args:
        change: the clause on its weights; "" if these stay.
        reason: why the weights stay; "" if they change, or are not rounded here.
        moved: whether the bias takes the mean error.
        held: the clause on the held-back batches; "" if none is held back.
    """
    if change:
        return change if moved else f"{change}; its bias stays: {held}"
    if not moved:
        return ""
    parts = ("its bias takes the mean error", held, reason)
    return "; ".join(part for part in parts if part)


class _LayerRounding:
    """The rounding of one layer's weights, which stays if it lowers the error of the layer's output.

    Args:
        options: the options of the algorithm.
        twins: both graphs, before the layer.
        layer: the layer.
        before: the errors of its output in each batch, with weights that are rounded to nearest.
    """

    def __init__(
        self, options: Gptq, twins: LayerTwins, layer: QuantizedLayer, before: Mapping[int, OutputErrors]
    ) -> None:
        self.options, self.twins, self.layer, self.before = options, twins, layer, before
        self.held = held_back(twins.count)
        self.weight = get_module(twins.quantized.traced, layer.weight).numpy().astype(np.float64)
        self.damping: float | None = None

    def run(self) -> tuple[Mapping[int, OutputErrors], str, str]:
        """Rounds the weights.

        Returns:
            The errors in each batch, a clause on the change ("" if the weights stay), and why they stay.
        """
        halves, fitted = self._moments()
        if self.options.refit and len(halves[0]) == 1:
            _, self.damping = correction(halves[0][0], halves[1][0])
        text = ""
        if self.held:
            self._write_rounded(fitted)
            before = summed(self.before, self.held).centered_noise
            tried = summed(layer_errors(self.twins, self.layer, self.held)).centered_noise
            text = gain_text(before, tried, self.held)
            if not tried < before:
                return self._restore(text)
        count = self._write_rounded(added(*halves))
        after = layer_errors(self.twins, self.layer)
        if not summed(after).centered_noise < summed(self.before).centered_noise:
            return self._restore("")
        clauses = [f"{count} weights are not rounded to nearest"]
        if self.damping is not None:
            clauses.append(f"fitted to what is read with damping {self.damping:g}")
        return after, ", ".join(clauses) + (f"; {text}" if text else ""), ""

    def _restore(self, text: str) -> tuple[Mapping[int, OutputErrors], str, str]:
        write(self.twins.quantized.traced, self.layer.weight, self.weight)
        self.twins.quantized.changed()
        reason = "rounding to nearest is better"
        return self.before, "", f"{reason}: {text}" if text else reason

    def _write_rounded(self, sums: list[SecondMoments]) -> int:
        """Stores weights that are fitted and rounded by ``sums``; returns how many are not nearest."""
        rows = grouped(self.weight)
        scale, zero_point, qparams = _grid(self.layer, rows)
        flat = rows.reshape(-1, rows.shape[-1])
        near = nearest(flat, scale, zero_point, qparams).reshape(rows.shape)
        if self.damping is not None:
            rows = rows + ridge(sums[0], self.damping).transpose(0, 2, 1)
        new = np.empty_like(rows)
        for group, part in enumerate(rows):
            members = slice(group * len(part), (group + 1) * len(part))
            hessians = [m.square[group] for m in sums]
            grid = (scale[members], zero_point[members], qparams)
            new[group] = rounded(part, hessians, *grid, self.options.damp)
        write(self.twins.quantized.traced, self.layer.weight, new.reshape(self.weight.shape))
        self.twins.quantized.changed()
        return int((np.abs(new - near).reshape(len(scale), -1) > 0.5 * scale).sum())

    def _moments(self) -> tuple[list[list[SecondMoments]], list[SecondMoments]]:
        """Computes the moments of both halves of the samples, and of all samples that are not held back."""
        halves: list[list[SecondMoments]] = [[], []]
        fitted: list[list[SecondMoments]] = [[], []]
        for call in self.layer.calls:
            outputs = enumerate(self.twins.outputs(call.expr))
            pairs = [(self.twins.read(call.inputs[0], batch), reference) for batch, (reference, _) in outputs]
            if len(pairs) == 1 and len(pairs[0][0]) > 1:
                pairs = list(zip(*(np.array_split(part, 2) for part in pairs[0]), strict=True))
            for i, pair in enumerate(pairs):
                half, sums = 2 * i // len(pairs), self._sums(call, pair)
                halves[half] = added(halves[half], sums)
                if self.held and i not in self.held:
                    fitted[half] = added(fitted[half], sums)
        halves[1] = halves[1] or [0 * m for m in halves[0]]  # of a single sample
        if self.options.refit and self.layer.bias is not None:  # a bias takes the means
            halves, fitted = ([[m.centered() for m in half] for half in part] for part in (halves, fitted))
        return halves, added(*fitted)

    def _sums(self, call: OpCall, pair: tuple[np.ndarray, np.ndarray]) -> list[SecondMoments]:
        """Computes the moments of a batch."""
        (read, reference), places = pair, self.options.places
        sums = moments(read, reference, call, self.weight, places)
        if len(self.layer.calls) > 1:  # a position of a large map stands for more than one of a small map
            return [spacing(reference, call, places) * m for m in sums]
        return sums


def _grid(layer: QuantizedLayer, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, QParams]:
    """Returns scale and zero point of each row of (G, O, D), both (G * O, 1), and their parameters."""
    qparams = layer.quant.qparams()
    scale, zero_point = (
        np.broadcast_to(part.astype(np.float64).reshape(-1, 1), (rows.shape[0] * rows.shape[1], 1))
        for part in (qparams.scale, qparams.zero_point)
    )
    return scale, zero_point, qparams
