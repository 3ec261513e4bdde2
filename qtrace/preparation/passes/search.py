"""The search for a labelling that gains time by integers and keeps the outputs, for `place`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from qtrace.graph.types import Expr, Node
from qtrace.graph.walk import exprs
from qtrace.outputs.selections import reaching
from qtrace.preparation.passes._view import View
from qtrace.preparation.placement.frontier import (
    Point,
    choose_balanced,
    choose_fastest,
    find_frontier,
    find_smaller,
    quieten,
)
from qtrace.preparation.placement.noise import OutputNoise, PlannedSchemes, measure_noise
from qtrace.preparation.placement.problem import Problem, evaluate, find_rounded
from qtrace.preparation.placement.reference import MeasuredRun
from qtrace.preparation.placement.trials import LabellingTrial, Trials, round_weights
from qtrace.scheme import QScheme

__all__ = ["Search", "SearchOutcome"]

# Random vectors for each sample: more samples tell more than more vectors for each.
_PROBES = 1
# The SQNR of the worst group of an output below which its values tell next to nothing.
_WORTHLESS = 10.0
# The SQNR that the rows of a selection keep, and the share of them that are float's, where a labelling that
# gains time can have them; and the share below which it spoils the output.
_ROWS_DB, _ROWS_SHARE, _LEAST_ROWS = 32.0, 0.95, 0.75
# How many quieter labellings are tried for the sake of rows.
_MOST_TRIALS = 6
# The SQNR from which a graph that gains no time may still be rounded for its size, which nobody asked for.
_GOOD_ENOUGH = 20.0


@dataclass(frozen=True)
class SearchOutcome:
    """The labelling that `Search` found.

    Attributes:
        problem: the units and tensors, with noise where that was measured.
        point: the labelling.
        mode: the mode that was asked for; "smaller" where no op gains time, "float" where that spoils the
            outputs, too.
        trial: what the labelling does to the outputs.
        refused: what the first labelling does that gains time, if it spoils an output.
        frontier: the best labellings for many prices of noise, the fastest first; () for ``fastest``.
        measured: how the labels were chosen, if by measured times and noise.
        noise: what every rounding costs, where that was measured.
        weight_bits: the bits of weights of which no rule of the config says others.
        centred: whether ranges are symmetric where layers are slower if their input has a zero point, and the
            parts of a concat share theirs.
    """

    problem: Problem
    point: Point
    mode: str
    trial: LabellingTrial
    refused: LabellingTrial | None = None
    frontier: tuple[Point, ...] = ()
    measured: str = ""
    noise: OutputNoise | None = None
    weight_bits: int = 8
    centred: bool = False

    def instead(self, labels: Mapping[str, bool], measured: str = "") -> SearchOutcome:
        """Returns the outcome with other labels, which were not rounded on the images.

        Args:
            labels: the labels.
            measured: how they were chosen, if by measured times and noise.
        """
        point = Point(dict(labels), evaluate(self.problem, labels))
        mode = "float" if measured and not any(labels.values()) else self.mode
        return replace(self, point=point, mode=mode, trial=LabellingTrial(), refused=None, measured=measured)

    @property
    def float_labels(self) -> dict[str, bool]:
        """The labels with every op in float that the config does not place on integers itself."""
        return {unit.name: bool(unit.fixed) for unit in self.problem.units}


class Search:
    """Tries labellings, the best one first, until one keeps the outputs.

    Args:
        view: the graph under its config.
        problem: its units and tensors, without noise.
        run: the graph on a few images.
        mode: "balanced" or "fastest".
        noise: what every rounding costs, as an earlier search with other weights has measured it; None to
            measure it.
    """

    def __init__(
        self, view: View, problem: Problem, run: MeasuredRun, mode: str, noise: OutputNoise | None = None
    ) -> None:
        self.view, self.run, self.mode, self.noise = view, run, mode, noise
        self.frontier: list[Point] = []
        self.problem = problem if mode == "fastest" else self._with_noise(problem)

    def choose(self) -> SearchOutcome:
        """Returns the first labelling that does not spoil a group of columns of an output."""
        refused: LabellingTrial | None = None
        for point, mode in self._candidates():
            trial = self._try(point.labels)
            enough = trial.sqnr >= (_GOOD_ENOUGH if mode == "smaller" else _WORTHLESS)
            if enough and trial.selected >= _LEAST_ROWS:
                if self._selects and self.mode == "balanced" and mode == self.mode:
                    point, trial = self._keep_rows(point, trial)
                found = SearchOutcome(self.problem, point, mode, trial, refused, tuple(self.frontier))
                return replace(found, noise=self.noise)
            refused = refused or (None if mode == "smaller" else trial)
        labels = {unit.name: bool(unit.fixed) for unit in self.problem.units}
        mode, last = self.mode if any(labels.values()) else "float", self._try(labels)
        return SearchOutcome(self.problem, Point(labels, evaluate(self.problem, labels)), mode, last, refused)

    def _keep_rows(self, point: Point, trial: LabellingTrial) -> tuple[Point, LabellingTrial]:
        """Returns the fastest labelling whose rows are float's, or else the one that keeps most of them.

        Each labelling that is tried is expected to be quiet enough by what the one before it showed.
        """
        first = best = point, trial
        for _ in range(_MOST_TRIALS):
            if trial.sqnr >= _ROWS_DB and trial.selected >= _ROWS_SHARE:
                return point, trial
            factor = 10.0 ** (-max(_ROWS_DB - trial.sqnr, 1.0) / 10.0)
            limits = (factor * point.energy.noise, factor**0.5 * point.energy.noise)
            quieter = next(filter(None, (quieten(self.problem, point, limit) for limit in limits)), None)
            if quieter is None:
                break
            point, trial = quieter, self._try(quieter.labels)
            if _rank(trial) > _rank(best[1]):
                best = point, trial
        good = first[1].sqnr >= _GOOD_ENOUGH and first[1].selected >= _ROWS_SHARE
        return first if good and _rank(best[1]) < (_ROWS_SHARE, _ROWS_DB - 3.0) else best

    @cached_property
    def _selects(self) -> bool:
        return any(reaching(self.view.traced))

    def _candidates(self) -> Iterator[tuple[Point, str]]:
        """Yields the labelling that was asked for, quieter ones that gain time, then smaller files."""
        fastest = self.mode == "fastest"
        frontier = [] if fastest else find_frontier(self.problem)
        self.frontier = frontier
        first = choose_fastest(self.problem) if fastest else choose_balanced(self.problem, frontier)
        if any(first.labels.values()):
            yield first, self.mode
        if fastest:
            units = tuple(replace(unit, noise_weight=1.0) for unit in self.problem.units)
            self.problem = self._with_noise(replace(self.problem, units=units))
            frontier = find_frontier(self.problem)
        in_float = evaluate(self.problem, {unit.name: bool(unit.fixed) for unit in self.problem.units})
        noise = evaluate(self.problem, first.labels).noise
        for point in frontier:
            gains = point.energy.noise < noise and point.energy.seconds < in_float.seconds
            if gains and any(point.labels.values()):
                yield point, self.mode
        if not any(unit.fixed for unit in self.problem.units):
            yield from ((point, "smaller") for point in find_smaller(self.problem))

    def _with_noise(self, problem: Problem) -> Problem:
        """Returns ``problem`` with the noise of every value and weight that may be rounded."""
        view = self.view
        if self.noise is None:
            names = _find_candidates(problem)
            self.noise = measure_noise(self.run, view.calls, self._schemes, probes=_PROBES, names=names)
        else:
            bits = {expr.outputs[0].name: scheme.bits for expr, scheme in self._schemes.weights.items()}
            self.noise = self.noise.with_bits({name: bits[name] for name in self.noise.bits if name in bits})
        return problem.with_noise(self.noise.values, self.noise.weights)

    def _try(self, labels: Mapping[str, bool]) -> LabellingTrial:
        """Rounds what ``labels`` put on integers."""
        if not any(labels.values()):
            return LabellingTrial()
        rounded = find_rounded(self.problem, labels)
        weights = {e: weight for e, weight in self._weights.items() if labels.get(e.outputs[0].name)}
        values = {n: self._schemes.of_value(n) for n in self._nodes if n.name in rounded}
        return self._trials.round(values, weights)

    @cached_property
    def _schemes(self) -> PlannedSchemes:
        """The schemes of the config, an op's for what it reads, else for its result."""
        values: dict[Node, QScheme] = {}
        weights: dict[Expr, QScheme] = {}
        for expr, call in self.view.calls.items():
            choice = self.view.choices[expr]
            if call.weight is not None:
                weights[expr] = choice.weight.replace(block=None)
            for node in expr.outputs:
                values.setdefault(node, choice.output or choice.activation)
            values.update(dict.fromkeys(call.inputs, choice.activation))
        backend = self.view.backend
        return PlannedSchemes(backend.activation, backend.weight, values, weights)

    @cached_property
    def _nodes(self) -> list[Node]:
        names = {tensor.name for tensor in self.problem.tensors}
        results = (node for expr in exprs(self.view.traced) for node in expr.outputs)
        return [n for n in itertools.chain(self.view.traced.graph.inputs, results) if n.name in names]

    @cached_property
    def _weights(self) -> Mapping[Any, Any]:
        names = {unit.name for unit in self.problem.units if unit.integer_seconds is not None}
        view = self.view
        return round_weights(view.traced, view.calls, self._schemes, names)

    @cached_property
    def _trials(self) -> Trials:
        return Trials(self.run)


def _rank(trial: LabellingTrial) -> tuple[float, float]:
    """Returns how good the rows of a trial are: enough rows first, then their noise."""
    return min(trial.selected, _ROWS_SHARE), trial.sqnr


def _find_candidates(problem: Problem) -> set[str]:
    """Returns the names of the ops and values that may be rounded."""
    units = {unit.name for unit in problem.units if unit.integer_seconds is not None}
    near = (t.name for t in problem.tensors if t.producer in units or not units.isdisjoint(t.readers))
    return {*units, *near}
