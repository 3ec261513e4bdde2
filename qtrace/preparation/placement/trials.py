"""Runs a graph with roundings next to its float graph, and looks at each group of columns of its outputs.

What rounding each value and each weight of a calibrated graph costs at its outputs is estimated before. To
first order, an error d of a value changes the outputs by J d, with the Jacobian J of the outputs. Its
power is ``|J d|^2 = E[(r . J d)^2] = E[(J^T r . d)^2]`` for a random vector r of independent signs, as in
Hutchinson 1990, "A stochastic estimator of the trace of the influence matrix for Laplacian smoothing
splines". A backward pass that begins with r gives J^T r at every value of the graph, so a few passes measure
all values and weights.

The square of a whole product ``J^T r . d`` is right on average, but varies much over a few passes. The sum of
the squares of its channels varies less, but is right only if the errors of the channels are uncorrelated.
Rounding errors nearly are (Widrow, Kollar and Liu 1996, "Statistical theory of quantization"). The geometric
mean of both was nearest to real rounding on trained networks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.core.autodiff.grad import Grad

from qtrace.comparing.selections import LEAST_SHARE, SelectedShares, SelectionTape
from qtrace.comparing.sums import decibels, inner
from qtrace.data.batches import evaluating
from qtrace.gradients import conv2d
from qtrace.graph.interpreter import interpret
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import CallFunction, Expr, Node, TracedModule
from qtrace.graph.walk import owner
from qtrace.numerics import choose, fake_quantize
from qtrace.preparation.placement.reference import (
    EndGroup,
    MeasuredRun,
    Run,
    find_end_groups,
    is_roi_align,
    with_slopes,
)
from qtrace.scheme import QParams, QScheme


def estimate_noise(
    run: MeasuredRun, qparams: Mapping[Node, QParams], weights: Mapping[Expr, tuple[Node, Tensor]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Estimates the noise of rounding each value and weight, one at a time, relative to the outputs' power.

    More samples tell more than more random vectors for each, so that each batch gets one. Half of the
    batches are enough to compare roundings.

    Args:
        run: a flat, expanded float graph on a few small batches. Equal runs give equal results.
        qparams: node -> what its value is rounded by.
        weights: expr of a layer -> the node of its weight, and the rounded weight.

    Returns:
        Name of a node -> the noise of its value, and name of a layer's result -> the noise of its weight.
        What is absent lacks a finite gradient to an output.
    """
    model, groups = run.model, run.groups
    if not groups:
        return {}, {}
    with evaluating(model), quiet_engine(model):
        probe = Probe(model, groups, qparams, weights, run.generator())
        half = run.batches[::2]
        for inputs in half:
            probe.execute(inputs)
            run.advance()
    share = len(run.batches) / len(half) / len(groups)
    values, layers = (
        {node.name: share * power for node, power in totals.powers().items()} for totals in probe.totals
    )
    return values, layers


@dataclass(frozen=True)
class RoundingTrial:
    """The outcome of rounding.

    Attributes:
        sqnr: the counted SQNR of the worst group of columns of any output, in dB; infinite where nothing is
            lost. Rows that a selection picks are compared with the same rows.
        group: the name of that group; "" without one.
        selected: the share of selected rows that float selects, too; of the worst end.
        shown: the group with the lowest SQNR as the verdict measures it, without weights, and this SQNR.
    """

    sqnr: float = math.inf
    group: str = ""
    selected: float = 1.0
    shown: tuple[str, float] = ("", math.inf)

    @property
    def noise(self) -> float:
        """The noise power relative to the outputs', or the share of rows that are lost if that is more."""
        return max(10.0 ** (-self.sqnr / 10.0), 1.0 - self.selected)

    def keeps(self, least_db: float) -> bool:
        """Returns whether the worst group has ``least_db``, and a selection is still float's.

        Where all rows are others, none is left to compare, and `sqnr` would be infinite.
        """
        return self.sqnr >= least_db and self.selected >= LEAST_SHARE

    def describe(self) -> str:
        """Says what is left of the outputs, as a clause that begins with the worst of them."""
        if self.selected < LEAST_SHARE:
            return f"the selection would keep {self.selected:.1%} of its rows"
        return f"{self.group} would keep {self.sqnr:.1f} dB"


class Trials:
    """Compares runs with roundings with a float graph.

    Args:
        run: a flat, expanded float graph on a few images.

    Attributes:
        groups: the groups of columns of the outputs.

    Raises:
        CalibrationError: when the graph does not run on the images.
    """

    def __init__(self, run: MeasuredRun) -> None:
        self.run, self.model = run, run.model
        self.groups = tuple(group for group in run.groups if group.end in run.outputs)

    def ranges(self, nodes: Iterable[Node]) -> dict[Node, tuple[float, float]]:
        """Returns the smallest and largest value of each of ``nodes`` where these are finite."""
        return {n: ends for n, ends in self.run.ranges(nodes).items() if all(map(math.isfinite, ends))}

    def round(self, values: Mapping[Node, QScheme]) -> RoundingTrial:
        """Rounds values of the float graph, each to a grid that covers its range.

        Args:
            values: node -> the scheme of its value, read as one per tensor; values without a finite range
                stay as they are.
        """
        ranges = self.ranges(values)
        rounded = {node: choose(*ends, values[node].replace(axis=None)) for node, ends in ranges.items()}
        return self._try(self.model, {end: end for end in self.run.ends}, rounded)

    def measure(self, graph: TracedModule, ends: Mapping[Node, Node]) -> RoundingTrial:
        """Runs a quantized graph.

        Args:
            graph: the graph.
            ends: end of the float graph -> the node that has its value in ``graph``.
        """
        return self._try(graph, ends, {})

    def _try(
        self, graph: TracedModule, ends: Mapping[Node, Node], rounded: Mapping[Node, QParams]
    ) -> RoundingTrial:
        shares = SelectedShares.of(self.model, self.run.ends)
        totals = dict.fromkeys(self.groups, 0.0)
        # An engine tells no rows to compare, and changes no values on the way.
        computed = None if shares or rounded else self.run.compute(graph, set(ends.values()))
        same: Mapping[Node, np.ndarray]
        own: Mapping[Node, np.ndarray]
        with evaluating(self.model), evaluating(graph), quiet_engine(self.model):
            for index, (inputs, exact) in enumerate(zip(self.run.batches, self.run.exact(), strict=True)):
                if computed is not None:
                    same, own = exact, {end: computed[index][node] for end, node in ends.items()}
                else:
                    run = _TapedGraph(graph, ends.values(), rounded)
                    run.execute([graph, *inputs[1:]])
                    changed = {end: run.values[node].numpy() for end, node in ends.items()}
                    same, own = self._same_rows(inputs, exact, changed, run.tape, shares)
                self.run.advance()
                for group in totals:
                    totals[group] += group.noise(same[group.end], own[group.end])
        lost = {group: noise for group, noise in totals.items() if 0 < noise < math.inf}
        worst_share = shares.worst()
        selected = 1.0 if worst_share is None else worst_share
        if not lost:
            return RoundingTrial(selected=selected)
        worst = max(lost, key=lost.__getitem__)
        levels = {group.columns.name: decibels(1.0, noise / group.weight) for group, noise in lost.items()}
        shown = min(levels.items(), key=lambda item: item[1])
        return RoundingTrial(decibels(1.0, lost[worst]), worst.columns.name, selected, shown)

    def _same_rows(
        self,
        inputs: Sequence[Any],
        exact: Mapping[Node, np.ndarray],
        changed: dict[Node, np.ndarray],
        tape: SelectionTape,
        shares: SelectedShares,
    ) -> tuple[Mapping[Node, np.ndarray], Mapping[Node, np.ndarray]]:
        """Returns the exact and the rounded values of the rows that a run selects; adds to ``shares``."""
        if not tape.places:
            return exact, changed
        replay = _TapedGraph(self.model, self.run.ends, {}, tape.places)
        replay.execute(inputs)
        shares.add(replay.tape.shares)
        ends, exact = self.run.ends, {end: value.numpy() for end, value in replay.values.items()}
        same, own = (
            dict(zip(ends, shares.blank([side[end] for end in ends], replay.tape.shares), strict=True))
            for side in (exact, changed)
        )
        return same, own

    def column_ranges(self, nodes: Sequence[Node]) -> dict[Node, dict[str, tuple[float, float]]]:
        """Returns the range of each group of columns of those of ``nodes`` that have several groups.

        Every column counts: an op after a node may scale it up.
        """
        ranges: dict[Node, dict[str, tuple[float, float]]] = {}
        exact = self.run.exact(nodes)
        for group in find_end_groups(self.model, nodes, exact, self.run.counts, every_column=True):
            if not group.columns.whole:
                parts = [group.columns.select(batch[group.end]) for batch in exact]
                low, high = min(float(p.min()) for p in parts), max(float(p.max()) for p in parts)
                ranges.setdefault(group.end, {})[group.columns.name] = low, high
        return ranges


class _TapedGraph(Run):
    """Runs a graph with some of its values rounded, and keeps or replays its selections."""

    def __init__(
        self,
        model: TracedModule,
        ends: Iterable[Node],
        rounded: Mapping[Node, QParams],
        places: Sequence[np.ndarray] | None = None,
    ) -> None:
        super().__init__(model, tuple(ends))
        self.rounded, self.tape = rounded, SelectionTape(places)

    def on_node(self, node: Node, value: Any) -> Any:
        """Rounds the value of a node."""
        if node in self.rounded:
            value = Tensor(fake_quantize(value.numpy(), self.rounded[node]))
        return super().on_node(node, value)

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes ``expr``, with the places that are replayed."""
        return self.tape.run(expr, inputs)


@dataclass
class Totals:
    """Sums over batches and probes of the squared products of gradients and errors.

    Attributes:
        whole: node -> sum over samples of the squares of whole products.
        channels: node -> sum over samples and channels of the squares of each channel's products.
    """

    whole: dict[Node, float] = field(default_factory=dict)
    channels: dict[Node, float] = field(default_factory=dict)

    def add(self, node: Node, gradient: np.ndarray, error: np.ndarray) -> None:
        """Adds the products of one node in one probe of one batch."""
        samples, channels = (*gradient.shape[:2], 1, 1)[:2]
        rows = gradient.reshape(samples * channels, -1)
        products = np.einsum("ij,ij->i", rows, error.reshape(rows.shape)).astype(np.float64)
        sums = products.reshape(samples, channels).sum(axis=1)
        self.channels[node] = self.channels.get(node, 0.0) + inner(products, products)
        self.whole[node] = self.whole.get(node, 0.0) + inner(sums, sums)

    def powers(self) -> dict[Node, float]:
        """Returns the geometric mean of both sums of each node where they are finite."""
        means = {node: math.sqrt(self.whole[node] * self.channels[node]) for node in self.whole}
        return {node: mean for node, mean in means.items() if math.isfinite(mean)}


class Probe(Run):
    """Runs a float graph with random vectors at the ends, and adds products with their gradients to totals.

    Args:
        model: the graph.
        groups: the groups of columns to measure at.
        qparams: node -> what its value is rounded by.
        weights: expr of a layer -> the node of its weight, and the rounded weight.
        rng: the generator of the random vectors.

    Attributes:
        totals: the sums of the values, and of the results of layers with rounded weights.
    """

    def __init__(
        self,
        model: TracedModule,
        groups: Sequence[EndGroup],
        qparams: Mapping[Node, QParams],
        weights: Mapping[Expr, tuple[Node, Tensor]],
        rng: np.random.Generator,
    ) -> None:
        super().__init__(model, {group.end for group in groups})
        self.groups, self.qparams, self.weights, self.rng = groups, qparams, weights, rng
        self.totals = (Totals(), Totals())
        self.errors: dict[Node, np.ndarray] = {}
        self.tape: Grad | None = None

    def execute(self, inputs: Sequence[Any]) -> None:
        """Runs the graph forwards and backwards."""
        self.errors.clear()
        with Grad() as self.tape:
            super().execute(inputs)
            # A backward pass calls nothing for the tensors that it begins at: it begins at copies.
            ends = {group.end: F.copy(self.values[group.end]) for group in self.groups}
            self.tape(list(ends.values()), [self._draw(node, value) for node, value in ends.items()])

    def on_node(self, node: Node, value: Any) -> Any:
        """Attaches a callback for the gradient of ``node``."""
        if node in self.qparams or node in self.errors:
            value = F.copy(value)  # two nodes may share a tensor, and the graph's inputs are the caller's
            assert self.tape is not None
            exact = value.numpy() if node in self.qparams else None
            self.tape.wrt(value, callback=lambda gradient: self._take(node, exact, gradient.numpy()))
        return super().on_node(node, value)

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes ``expr``, and what its rounded weight changes."""
        results = self._run_differentiably(expr, inputs)
        if expr in self.weights and results:
            node, rounded = self.weights[expr]
            others = [rounded if n is node else v for n, v in zip(expr.inputs, inputs, strict=True)]
            changed = self._run_differentiably(expr, _detached(others))
            assert changed is not None
            self.errors[expr.outputs[0]] = changed[0].numpy() - results[0].numpy()
        return results

    def _run_differentiably(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes convolutions by a function with faster gradients."""
        if isinstance(expr, CallFunction) and expr.func is F.conv2d:
            args, kwargs = expr.unflatten_args(inputs)
            return (conv2d(*args, **kwargs),)
        if is_roi_align(expr):
            # Its gradient is added to memory that nothing has cleared.
            return interpret(expr, _detached(inputs))
        if isinstance(op := owner(expr), OpaqueOp):
            # It has no gradient, of which it would warn as if parameters were to learn.
            results = interpret(expr, _detached(inputs))
            if results is None:
                return None
            return with_slopes(op, inputs, results, lambda others: interpret(expr, _detached(others)) or ())
        return interpret(expr, inputs)

    def _draw(self, node: Node, value: Any) -> Tensor:
        """Draws signs, which give the estimate less variance than numbers of a normal distribution.

        Each group of columns counts relative to its own power; columns without power do not count.
        """
        sizes = np.zeros(value.shape, np.float32)
        for group in self.groups:
            if group.end is node:
                group.fill(sizes, 1.0 / math.sqrt(group.power))
        return Tensor(np.where(self.rng.random(value.shape, np.float32) < 0.5, -sizes, sizes))

    def _take(self, node: Node, exact: np.ndarray | None, gradient: np.ndarray) -> None:
        values, weights = self.totals
        if exact is not None:
            values.add(node, gradient, fake_quantize(exact, self.qparams[node]) - exact)
        if node in self.errors:
            weights.add(node, gradient, self.errors[node])


def _detached(inputs: Sequence[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, Tensor) else value for value in inputs]
