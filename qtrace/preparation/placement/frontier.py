"""The labellings between the fastest and the most accurate one, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qtrace.preparation.placement.labelling import Cuts, minimize
from qtrace.preparation.placement.problem import Energy, Neighbourhoods, Problem, evaluate

__all__ = [
    "LEAST_GAIN",
    "WORTHLESS_DB",
    "Point",
    "choose_balanced",
    "choose_fastest",
    "find_frontier",
    "gains",
    "in_float",
    "price",
]


# Weights of the noise, in units of the float time: from "time alone" to "noise alone".
_WEIGHTS = tuple(10.0 ** (exponent / 3) for exponent in range(-18, 19))
# One dB less noise at the outputs is worth this share of the time.
_PRICE_OF_A_DB = 0.04
# Noise of this power, relative to the outputs' (-25 dB), seldom changes a prediction: less is worth little.
_NEGLIGIBLE_NOISE = 3e-3
WORTHLESS_DB = 10.0
"""Below this SQNR the values of an output tell next to nothing: noise is more than 10 % of the signal."""
LEAST_GAIN = 1.05
"""A file that gains less by its integers is float: runs of one file differ by as much."""


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
    seconds = in_float(problem).energy.seconds
    points: dict[tuple[bool, ...], Point] = {}
    for labels in _minimize_for_all(problem, [factor * seconds for factor in _WEIGHTS]):
        points.setdefault(tuple(labels.values()), Point(labels, evaluate(problem, labels)))
    ordered = sorted(points.values(), key=lambda p: (p.energy.seconds, p.energy.noise))
    frontier: list[Point] = []
    for point in ordered:
        if not frontier or point.energy.noise < frontier[-1].energy.noise:
            frontier.append(point)
    return frontier


def _minimize_for_all(problem: Problem, weights: Sequence[float]) -> list[dict[str, bool]]:
    """Returns the different best labels for the weights, which ascend, of the noise.

    Time plus weighted noise of a labelling is linear in the weight. What is best at two weights is best
    between them, too, so that a minimum cut serves all weights between two with the same one.
    """
    cuts = Cuts(problem)
    labels = {index: cuts.minimize(weights[index]) for index in (0, len(weights) - 1)}
    waiting = [(0, len(weights) - 1)]
    while waiting:
        start, stop = waiting.pop()
        if stop - start < 2 or labels[start] == labels[stop]:
            continue
        middle = (start + stop) // 2
        labels[middle] = cuts.minimize(weights[middle])
        waiting += [(start, middle), (middle, stop)]
    return [labels[index] for index in sorted(labels)]


def in_float(problem: Problem) -> Point:
    """Returns the labelling with every op in float that the config does not place on integers itself."""
    labels = {unit.name: bool(unit.fixed) for unit in problem.units}
    return Point(labels, evaluate(problem, labels))


def gains(problem: Problem, point: Point) -> bool:
    """Returns whether a labelling is predicted to gain enough time for its noise to be looked at."""
    return point.energy.seconds * LEAST_GAIN <= in_float(problem).energy.seconds


def choose_fastest(problem: Problem) -> Point:
    """Returns the labelling with the least time, whatever its noise; float if that gains too little."""
    labels = minimize(problem, 0.0)
    point = Point(labels, evaluate(problem, labels))
    return point if gains(problem, point) else in_float(problem)


def choose_balanced(problem: Problem, most_noise: float) -> Point | None:
    """Returns the labelling at which one more dB would cost more time than it is worth.

    It minimizes the logarithm of the time plus a price for each dB of noise. The best point of the frontier
    is improved by single changes: cuts find only the points of the frontier's convex hull, which leaves gaps.

    Args:
        problem: the units and tensors, with noise.
        most_noise: the noise power that it may have.

    Returns:
        The labelling; None if none that is quiet enough gains time.
    """

    def fits(point: Point) -> bool:
        return point.energy.noise <= most_noise and gains(problem, point)

    points = [point for point in find_frontier(problem) if fits(point)]
    if not points:
        return None
    best = min(points, key=lambda point: _cost(point.energy))
    refined = _refine(problem, best)
    return refined if fits(refined) else best


def _refine(problem: Problem, point: Point) -> Point:
    """Changes one label after the other, the best first, as long as that improves."""
    neighbourhoods = Neighbourhoods(problem)
    free = [unit.name for unit in problem.units if unit.fixed is None]
    labels, energy = dict(point.labels), point.energy
    while True:  # each step improves
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
    return price(energy.seconds, energy.weighted_noise)


def price(seconds: float, noise: float) -> float:
    """Returns the price of a labelling: the logarithm of its time, and 4 % of it for each dB of noise.

    Args:
        seconds: its time.
        noise: the noise power at the outputs, relative to theirs; what is 25 dB below counts for little.
    """
    decibels = 10 * math.log10(max(noise, 0.0) + _NEGLIGIBLE_NOISE)
    return math.log(max(seconds, 1e-12)) + _PRICE_OF_A_DB * decibels
