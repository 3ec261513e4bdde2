"""The labellings between the fastest and the most accurate one, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qtrace.preparation.placement.labelling import Cuts, minimize
from qtrace.preparation.placement.problem import Energy, Neighbourhoods, Problem, evaluate

__all__ = ["Point", "choose_balanced", "choose_fastest", "find_frontier", "find_smaller", "price", "quieten"]


# Weights of the noise, in units of the float time: from "time alone" to "noise alone".
_WEIGHTS = tuple(10.0 ** (exponent / 3) for exponent in range(-18, 19))
# One dB less noise at the outputs is worth this share of the time.
_PRICE_OF_A_DB = 0.04
# Noise of this power, relative to the outputs' (-25 dB), seldom changes a prediction: less is worth little.
_NEGLIGIBLE_NOISE = 3e-3
# Where integers gain no time and only make a file smaller, they may take this share of the float time, or
# some seconds more, which is less than anyone notices.
_MOST_LOSS, _UNNOTICED_SECONDS = 1.5, 1e-4
# What it is worth to store all weights as integers where no time is gained, in units of the float time.
_WORTHS = tuple(4.0**exponent for exponent in range(-3, 5))
_WORTH_OF_NOISE = (0.0, *(10.0**exponent for exponent in range(-3, 3)))
# Steps of `_refine`: many more than it takes, as each must improve.
_MAX_STEPS = 1000
# The least time that a single change of `quieten` counts as.
_LEAST_SECONDS = 1e-9


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


def find_smaller(problem: Problem) -> list[Point]:
    """Returns labellings for a graph that gains no time by integers: those with most integer weights first.

    A weight on integers takes a quarter of its bytes. What takes more than 1.5 times the time in float, and
    more than 0.1 ms longer, is left out. Of two labellings with equally many weights on integers, there is
    the one with less noise.
    """
    total = sum(unit.weights for unit in problem.units if unit.integer_seconds is not None)
    in_float = evaluate(problem, dict.fromkeys((unit.name for unit in problem.units), False)).seconds
    points: dict[tuple[bool, ...], Point] = {}
    for worth in _WORTHS if total else ():
        rewarded = [
            replace(unit, float_seconds=unit.float_seconds + worth * in_float * unit.weights / total)
            for unit in problem.units
        ]
        weights = [weight * in_float for weight in _WORTH_OF_NOISE]
        for labels in _minimize_for_all(replace(problem, units=tuple(rewarded)), weights):
            points.setdefault(tuple(labels.values()), Point(labels, evaluate(problem, labels)))

    def stored(point: Point) -> int:
        return sum(unit.weights for unit in problem.units if point.labels[unit.name])

    limit = max(_MOST_LOSS * in_float, in_float + _UNNOTICED_SECONDS)
    fitting = (point for point in points.values() if stored(point) and point.energy.seconds <= limit)
    quietest: dict[int, Point] = {}
    for point in sorted(fitting, key=lambda point: (-stored(point), point.energy.noise)):
        quietest.setdefault(stored(point), point)
    return list(quietest.values())


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
    return price(energy.seconds, energy.weighted_noise)


def price(seconds: float, noise: float) -> float:
    """Returns the price of a labelling: the logarithm of its time, and 4 % of it for each dB of noise.

    Args:
        seconds: its time.
        noise: the noise power at the outputs, relative to theirs; what is 25 dB below counts for little.
    """
    decibels = 10 * math.log10(max(noise, 0.0) + _NEGLIGIBLE_NOISE)
    return math.log(max(seconds, 1e-12)) + _PRICE_OF_A_DB * decibels


def quieten(problem: Problem, point: Point, noise: float) -> Point | None:
    """Returns a labelling with at most ``noise`` that is still faster than float; None if there is none.

    Single changes make it quieter: each costs the least time for the noise that it removes.

    Args:
        problem: the units and tensors, with noise.
        point: the labelling to begin with.
        noise: the noise power to reach.
    """
    neighbourhoods = Neighbourhoods(problem)
    in_float = evaluate(problem, {unit.name: bool(unit.fixed) for unit in problem.units})
    labels = dict(point.labels)
    energy = evaluate(problem, labels)
    free = [unit.name for unit in problem.units if unit.fixed is None and labels[unit.name]]
    while energy.noise > noise and free:
        changes = {name: neighbourhoods.flip(labels, name) for name in free}
        prices = {
            name: max(change.seconds, _LEAST_SECONDS) / -change.noise
            for name, change in changes.items()
            if change.noise < 0
        }
        if not prices:
            return None
        name = min(prices, key=prices.__getitem__)
        labels[name] = False
        free.remove(name)
        energy = evaluate(problem, labels)
    fits = energy.noise <= noise and energy.seconds < in_float.seconds and any(labels.values())
    return Point(labels, energy) if fits else None
