"""GPTQ: rounds the weights of a layer input by input, and compensates each error in the inputs that follow.

The error of a layer's output is ``(w - w~) H (w - w~)`` for each row w of its weight, with ``H = X X^T`` of
its inputs. Rounding to nearest minimizes it only if H is diagonal. GPTQ rounds the columns in turn and
adjusts the columns that are still free to compensate the error (Frantar et al. 2022, "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers", section 3, after Hassibi and Stork 1993,
"Optimal Brain Surgeon"). In the form of Chee et al. 2023, "QuIP", theorem 6. With ``H = R R^T`` and R upper
triangular, an error ``w_i - q_i`` of column i moves the columns j > i by its share ``R_ij / R_jj``. Nothing
is learned: each layer costs a pass over the data and a factorization. Layers are rounded in graph order, each
on inputs from the quantized layers before it. A layer that is called several times, as the head of a detector
is for each level, is rounded once, by the sum of H over its calls.

The statistics of a layer are collected once; the error of each candidate is algebra on them, see
`qtrace.ptq.layers.statistics`.

With `refit` the weights are first fitted to these inputs, see `qtrace.ptq.layers.second_order`. A part of the
batches is held back and decides for each layer whether its new weights and its new bias stay, see
`qtrace.ptq.layers.held_back`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from qtrace.display import progress_bar
from qtrace.graph.kernels import read_array
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import get_module
from qtrace.numerics import expand_blocks
from qtrace.plugins.options import Float, Int
from qtrace.process import LargeFrees, Together, one_blas_thread
from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, FloatTask, Left, Report, SiteNoise
from qtrace.ptq.layers.held_back import compare, gain_text
from qtrace.ptq.layers.quantized import QuantizedLayer, quantized_layers, write
from qtrace.ptq.layers.scaling import add_biases, correct_bias
from qtrace.ptq.layers.second_order import (
    Grid,
    SecondMoments,
    added,
    correction,
    grouped,
    nearest,
    ridge,
    rounded,
    rounded_groups,
)
from qtrace.ptq.layers.statistics import HELD, StatisticsCollector, WeightErrors

__all__ = ["Gptq"]

# The kinds of layers whose weights are rounded.
_KINDS = ("conv2d", "linear")
_FREED = 4  # times the weight that its layer takes and frees again, at least


class Gptq(CalibratedAlgorithm):
    """Chooses the roundings of each layer's weights by the second moments of its inputs; scales stay.

    Attributes:
        damp: the damping that is added to the diagonal of H, as a share of its mean.
        places: the most positions of each sample's feature map that count, one in each equal part.
            More for layers with less than 256 inputs in all groups, and fewer where all samples together
            have more than 8 positions for each input that is rounded jointly, 2048 at least.
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
        # More threads add up products of matrices in another order, and weights then round otherwise.
        with one_blas_thread(), Together(task.threads) as together:
            return self._apply(task, together)

    def _apply(self, task: CalibratedTask, together: Together) -> Report:
        quantized, left = quantized_layers(task.model, shared=True)
        layers = []
        for layer in quantized:
            supported = layer.call.kind in _KINDS
            if not supported:
                left.append(Left(layer.title, f"weights of {layer.call.kind} are rounded to nearest"))
            if supported or (self.refit and layer.bias is not None):
                layers.append(layer)
        collector = StatisticsCollector(task, layers, self.places, _KINDS, together)
        changed, errors, frees = [], [], LargeFrees()
        for layer in progress_bar(layers, desc="gptq", unit="layer", disable=not task.progress):
            rounding = _LayerRounding(self, task.model, layer, collector, together)
            outcome = rounding.run()
            collector.quantized.changed()
            frees.note(_FREED * rounding.weight.nbytes)
            del rounding
            errors.append(outcome.noise)
            if outcome.change:
                changed.append(f"{layer.title}: {outcome.change}")
            else:
                left.append(Left(layer.title, outcome.reason))
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


@dataclass(frozen=True)
class _Outcome:
    """What became of a layer: a clause on the change ("" if there is none), why it stays, and its error."""

    change: str
    reason: str
    noise: SiteNoise


class _LayerRounding:
    """The rounding of one layer's weights, which stays if it lowers the error of the layer's output.

    Args:
        options: the options of the algorithm.
        model: the quantized graph.
        layer: the layer.
        collector: collects the statistics of the layer.
        together: the threads that compute.
    """

    def __init__(
        self,
        options: Gptq,
        model: TracedModule,
        layer: QuantizedLayer,
        collector: StatisticsCollector,
        together: Together,
    ) -> None:
        self.options, self.model, self.layer, self._together = options, model, layer, together
        self.statistics = collector.collect(layer)
        self.held = collector.held
        self.weight = read_array(get_module(model, layer.weight)).astype(np.float64)
        self.rows = grouped(self.weight)
        self.supported = layer.call.kind in _KINDS
        self.damping: float | None = None

    def run(self) -> _Outcome:
        """Chooses the weights and the bias, and writes those that change."""
        layer = self.layer
        if self.supported:
            near = WeightErrors(self.statistics, self._nearest() - self.rows)
            chosen, clause, reason = self._choose(near)
        else:
            near = chosen = WeightErrors(self.statistics, None)
            clause, reason = "", ""
        if clause and chosen.change is not None:
            write(self.model, layer.weight, (self.rows + chosen.change).reshape(self.weight.shape))
        held = ""
        if self.options.refit and layer.bias is not None:
            moved, held = correct_bias(self.model, layer, chosen.total, chosen.fitted_mean, chosen.held)
            clause = _with_bias(clause, reason, moved is not None, held)
        ratios = (e.decibels(e.centered_noise) for e in (near.total, chosen.total))
        return _Outcome(clause, reason or f"its bias stays: {held}", SiteNoise(layer.name, *ratios))

    def _choose(self, near: WeightErrors) -> tuple[WeightErrors, str, str]:
        """Chooses the weights.

        Args:
            near: the weights rounded to nearest.

        Returns:
            The weights, a clause on them ("" if they are rounded to nearest), and why those stay.
        """
        reason, fitted, text = "rounding to nearest is better", None, ""
        known: list[WeightErrors] = []
        halves = [self._moments([fold]) for fold in (0, 1)]
        halves[1] = halves[1] or [0 * m for m in halves[0]]  # of a single sample
        if self.options.refit and not self.statistics.wide:
            fitted, self.damping = correction(halves[0][0], halves[1][0], self._together)
        whole = self._moments((0, 1, HELD))

        calls: list[Callable[[], WeightErrors]] = [lambda: self._errors_of(whole).compute(), near.compute]
        if self.held:
            tries = [lambda: self._errors_of(added(*halves), fitted).compute(whole=False)]
            # On several threads, what is asked next is computed meanwhile.
            tried, *known = self._together.run([*tries, *(calls if self._together.threads > 1 else [])])
            gain = compare(near.held, tried.held)
            text = gain_text(*gain.noises, self.held)
            if not gain.supported:
                return near, "", f"{reason}: {text}"
        new, _ = known or self._together.run(calls)
        if not new.total.centered_noise < near.total.centered_noise:
            return near, "", f"{reason}: {text}" if text else reason
        assert new.change is not None
        assert near.change is not None
        scale = self.grid[0].reshape(len(self.rows), -1, self.grid[0].shape[1])
        count = int((np.abs(new.change - near.change) > 0.5 * scale).sum())
        clauses = [f"{count} weights are not rounded to nearest"]
        if self.damping is not None:
            clauses.append(f"fitted to what is read with damping {self.damping:g}")
        return new, ", ".join(clauses) + (f"; {text}" if text else ""), ""

    @cached_property
    def grid(self) -> Grid:
        """The grid of each row of the weight."""
        return _grid(self.layer, self.rows)

    def _nearest(self) -> np.ndarray:
        flat = self.rows.reshape(-1, self.rows.shape[-1])
        return nearest(flat, *self.grid).reshape(self.rows.shape)

    def _errors_of(self, sums: list[SecondMoments], fitted: np.ndarray | None = None) -> WeightErrors:
        """Returns weights that are fitted and rounded by ``sums``, with their errors; see `_rounded`."""
        return WeightErrors(self.statistics, self._rounded(sums, fitted) - self.rows)

    def _rounded(self, sums: list[SecondMoments], fitted: np.ndarray | None) -> np.ndarray:
        """Returns weights that are fitted and rounded by ``sums``.

        Args:
            sums: the moments.
            fitted: the correction by these moments, (G, D, O), where it is known.
        """
        rows = self.rows
        scale, zero_point, qparams = self.grid
        if self.damping is not None:
            change = ridge(sums[0], self.damping) if fitted is None else fitted
            rows = rows + change.transpose(0, 2, 1)
        if len(rows) > 1 and len(sums) == 1:
            return rounded_groups(rows, sums[0].square, self.grid, self.options.damp)
        new = np.empty_like(rows)
        for group, part in enumerate(rows):
            members = slice(group * len(part), (group + 1) * len(part))
            hessians = [m.square[group] for m in sums]
            grid = (scale[members], zero_point[members], qparams)
            new[group] = rounded(part, hessians, *grid, self.options.damp, self._together)
        return new

    def _moments(self, folds: Sequence[int]) -> list[SecondMoments]:
        """Returns the moments of some folds, about their means if a bias takes these."""
        sums = self.statistics.moments(folds)
        centered = self.options.refit and self.layer.bias is not None
        return [m.centered() for m in sums] if centered else sums


def _grid(layer: QuantizedLayer, rows: np.ndarray) -> Grid:
    """Returns scale and zero point of each row of (G, O, D), both (G * O, 1), and their parameters.

    With a scale per block of inputs both are (O, D).
    """
    qparams = layer.quant.qparams()
    if qparams.scheme.block is not None:
        scale, zero_point = expand_blocks(qparams, rows.shape[1:])
        return scale.astype(np.float64), zero_point.astype(np.float64), qparams
    scale, zero_point = (
        np.broadcast_to(part.astype(np.float64).reshape(-1, 1), (rows.shape[0] * rows.shape[1], 1))
        for part in (qparams.scale, qparams.zero_point)
    )
    return scale, zero_point, qparams
