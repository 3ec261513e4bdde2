"""Makes a labelling quieter by single changes: each costs the least time for the noise that it removes."""

from __future__ import annotations

from qtrace.preparation.placement.frontier import Point
from qtrace.preparation.placement.problem import Neighbourhoods, Problem, evaluate

__all__ = ["quieten"]

_LEAST_SECONDS = 1e-9


def quieten(problem: Problem, point: Point, noise: float) -> Point | None:
    """Returns a labelling with at most ``noise`` that is still faster than float; None if there is none.

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
