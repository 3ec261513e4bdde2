"""Rounds values and weights of a float graph for real, and looks at each group of columns of its outputs."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.data.batches import evaluating
from qtrace.graph.engine import quiet_engine
from qtrace.graph.types import Expr, Node, TracedModule
from qtrace.metrics import decibels
from qtrace.numerics import fake_quantize
from qtrace.ops import OpCall
from qtrace.outputs.replay import LEAST_SHARE, SelectedShares, SelectionTape
from qtrace.preparation.placement._groups import find_end_groups
from qtrace.preparation.placement._runs import Run, choose_qparams
from qtrace.preparation.placement._sites import PlannedSchemes, Sites, find_sites
from qtrace.preparation.placement.reference import MeasuredRun
from qtrace.scheme import QParams, QScheme

__all__ = ["LabellingTrial", "Trials", "round_weights"]


@dataclass(frozen=True)
class LabellingTrial:
    """The outcome of rounding.

    Attributes:
        sqnr: of the worst group of columns of any output, in dB; infinite where nothing is lost. Rows that a
            selection picks are compared with the same rows.
        group: the name of that group; "" without one.
        selected: the share of selected rows that float selects, too; of the worst end.
    """

    sqnr: float = math.inf
    group: str = ""
    selected: float = 1.0

    def keeps(self, least_db: float) -> bool:
        """Returns whether the worst group has ``least_db``, and a selection is still that of float.

        Where all rows are others, none is left to compare, and `sqnr` alone would be infinite.
        """
        return self.sqnr >= least_db and self.selected >= LEAST_SHARE

    def describe(self) -> str:
        """Says what is left of the outputs, as a clause that begins with the worst of them."""
        if self.selected < LEAST_SHARE:
            return f"the selection would keep {self.selected:.1%} of its rows"
        return f"{self.group} would keep {self.sqnr:.1f} dB"


class Trials:
    """Runs a graph with some of its values and weights rounded.

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

    def round(
        self,
        values: Mapping[Node, QScheme],
        weights: Mapping[Expr, tuple[Node, Tensor]] | None = None,
    ) -> LabellingTrial:
        """Rounds values, each to a grid that covers its range, and weights; returns the worst group.

        Args:
            values: node -> the scheme of its value, read as one per tensor; values without a finite range
                stay as they are.
            weights: expr of a layer -> the node of its weight and the rounded weight.
        """
        rounded = choose_qparams(self.ranges(values), values)
        sites = Sites(frozenset(), {}, self.run.ends)
        shares = SelectedShares.of(self.model, self.run.ends)
        totals = dict.fromkeys(self.groups, 0.0)
        with evaluating(self.model), quiet_engine(self.model):
            for inputs, exact in zip(self.run.batches, self.run.exact(), strict=True):
                run = _RoundedGraph(self.model, sites, rounded, weights or {})
                run.execute(inputs)
                self.run.advance()
                same, changed = self._same_rows(inputs, exact, run, shares)
                for group in totals:
                    totals[group] += group.noise(same[group.end], changed[group.end])
        lost = {group: noise for group, noise in totals.items() if 0 < noise < math.inf}
        worst_share = shares.worst()
        selected = 1.0 if worst_share is None else worst_share
        if not lost:
            return LabellingTrial(selected=selected)
        worst = max(lost, key=lost.__getitem__)
        return LabellingTrial(decibels(1.0, lost[worst]), worst.columns.name, selected)

    def _same_rows(
        self,
        inputs: Sequence[Any],
        exact: Mapping[Node, np.ndarray],
        run: _RoundedGraph,
        shares: SelectedShares,
    ) -> tuple[Mapping[Node, np.ndarray], Mapping[Node, np.ndarray]]:
        """Returns the exact and the rounded values of the rows that ``run`` selects; adds to ``shares``."""
        changed = {end: value.numpy() for end, value in run.ends.items()}
        if not run.tape.places:
            return exact, changed
        replay = _RoundedGraph(self.model, run.sites, {}, {}, run.tape.places)
        replay.execute(inputs)
        same = {end: value.numpy() for end, value in replay.ends.items()}
        shares.add(replay.tape.shares)
        for index, end in enumerate(self.run.ends):
            same[end], changed[end] = (
                shares.blank(index, side[end], replay.tape.shares) for side in (same, changed)
            )
        return same, changed

    def column_ranges(self, nodes: Sequence[Node]) -> dict[Node, dict[str, tuple[float, float]]]:
        """Returns the range of each group of columns of those of ``nodes`` that have several groups.

        Every column counts: an op behind a node may scale it up.
        """
        ranges: dict[Node, dict[str, tuple[float, float]]] = {}
        exact = self.run.exact(nodes)
        for group in find_end_groups(self.model, nodes, exact, self.run.counts, every_column=True):
            if not group.columns.whole:
                parts = [group.columns.select(batch[group.end]) for batch in exact]
                low, high = min(float(p.min()) for p in parts), max(float(p.max()) for p in parts)
                ranges.setdefault(group.end, {})[group.columns.name] = low, high
        return ranges


def round_weights(
    model: TracedModule,
    calls: Mapping[Expr, OpCall],
    schemes: PlannedSchemes,
    names: Container[str],
) -> Mapping[Expr, tuple[Node, Tensor]]:
    """Rounds the weights of the layers whose results have the ``names``, each by its scheme.

    Returns:
        expr of a layer -> the node of its weight and the rounded weight.
    """
    return find_sites(model, calls, schemes, names).weights


class _RoundedGraph(Run):
    """Runs the graph with some of its values and weights rounded."""

    def __init__(
        self,
        model: TracedModule,
        sites: Sites,
        values: Mapping[Node, QParams],
        weights: Mapping[Expr, tuple[Node, Tensor]],
        places: Sequence[np.ndarray] | None = None,
    ) -> None:
        super().__init__(model, sites)
        self.values, self.weights, self.tape = values, weights, SelectionTape(places)

    def on_node(self, node: Node, value: Any) -> Any:
        """Rounds the value of a node."""
        if node in self.values:
            value = Tensor(fake_quantize(value.numpy(), self.values[node]))
        return super().on_node(node, value)

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes a layer with its rounded weight."""
        if expr in self.weights:
            node, weight = self.weights[expr]
            inputs = [weight if n is node else v for n, v in zip(expr.inputs, inputs, strict=True)]
        return self.tape.run(expr, inputs)
