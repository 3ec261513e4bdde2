"""The labellings between the fastest and the most accurate one, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qtrace.preparation.placement.labelling import minimize
from qtrace.preparation.placement.problem import Energy, Neighbourhoods, Problem, evaluate

__all__ = ["Point", "choose_balanced", "choose_fastest", "find_frontier"]

# Weights of the noise, in units of the float time: from "time alone" to "noise alone".
_WEIGHTS = tuple(10.0 ** (exponent / 3) for exponent in range(-18, 19))
# One dB less noise at the outputs is worth this share of the time.
_PRICE_OF_A_DB = 0.04
# Noise of this power, relative to the outputs' (-25 dB), seldom changes a prediction: less is worth little.
_NEGLIGIBLE_NOISE = 3e-3
# Steps of `_refine`: many more than it takes, as each must improve.
_MAX_STEPS = 1000


@dataclass(frozen=True)
class Point:
    """One labelling of a graph.

    Attributes:
        labels: unit -> whether it runs on integers.
        energy: its time and noise.
    """

    labels: Mapping[str, bool]
    energy: Energy


def find_frontier(problem: Problem) -> list[Point]:
    """Returns the best labellings for many weights of the noise: each faster than the next, and noisier."""
    all_float = {unit.name: bool(unit.fixed) for unit in problem.units}
    seconds = evaluate(problem, all_float).seconds
    points: dict[tuple[bool, ...], Point] = {}
    for factor in _WEIGHTS:
        labels = minimize(problem, factor * seconds)
        key = tuple(labels.values())
        if key not in points:
            points[key] = Point(labels, evaluate(problem, labels))
    ordered = sorted(points.values(), key=lambda p: (p.energy.seconds, p.energy.noise))
    frontier: list[Point] = []
    for point in ordered:
        if not frontier or point.energy.noise < frontier[-1].energy.noise:
            frontier.append(point)
    return frontier


def choose_fastest(problem: Problem) -> Point:
    """Returns the labelling with the least time, whatever its noise."""
    labels = minimize(problem, 0.0)
    return Point(labels, evaluate(problem, labels))


def choose_balanced(problem: Problem, frontier: list[Point]) -> Point:
    """Returns the labelling at which one more dB would cost more time than it is worth.

    It minimizes the logarithm of the time plus a price for each dB of noise. The best point of the frontier
    is improved by single changes: cuts find only the points of the frontier's convex hull, which leaves gaps.
    """
    return _refine(problem, min(frontier, key=lambda point: _cost(point.energy)))


def _refine(problem: Problem, point: Point) -> Point:
    """Changes one label after the other, the best first, as long as that improves."""
    neighbourhoods = Neighbourhoods(problem)
    free = [unit.name for unit in problem.units if unit.fixed is None]
    labels, energy = dict(point.labels), point.energy
    for _ in range(_MAX_STEPS):
        costs = {name: _cost(_add(energy, neighbourhoods.flip(labels, name))) for name in free}
        best = min(costs, key=costs.__getitem__, default="")
        if not best or costs[best] >= _cost(energy) - 1e-9:
            break
        energy = _add(energy, neighbourhoods.flip(labels, best))
        labels[best] = not labels[best]
    return Point(labels, evaluate(problem, labels))


def _add(energy: Energy, change: Energy) -> Energy:
    return Energy(
        energy.seconds + change.seconds,
        energy.noise + change.noise,
        energy.weighted_noise + change.weighted_noise,
    )


def _cost(energy: Energy) -> float:
    decibels = 10 * math.log10(max(energy.weighted_noise, 0.0) + _NEGLIGIBLE_NOISE)
    return math.log(max(energy.seconds, 1e-12)) + _PRICE_OF_A_DB * decibels
