"""Interpolation of times between measured points: exact at the points, and growing with every coordinate."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["MonotoneGrid", "lower_envelope"]

Point = tuple[float, ...]


def lower_envelope(points: Mapping[Point, float]) -> dict[Point, float]:
    """Lowers each time to the shortest one among the points that are at least as large in every coordinate.

    Other work on a machine only adds time, so a smaller op that took longer than a larger one was disturbed.
    Times that grow with every coordinate are returned as they are.
    """
    places = np.array(list(points), dtype=float)
    times = np.array(list(points.values()))
    return {
        point: float(times[(places >= place).all(axis=1)].min())
        for point, place in zip(points, places, strict=True)
    }


class MonotoneGrid:
    """Seconds over positive coordinates, such as channels and pixels.

    The coordinates of the points make a grid. Combinations that were not measured are filled from the nearest
    point and the mean slopes. Between the points of the grid, the logarithm of the time is linear in the
    logarithm of each coordinate. Below the smallest coordinate the time stays constant, since the fixed cost
    of a kernel dominates there; above the largest one it is proportional to the coordinate.

    Args:
        points: coordinates -> seconds, at least one. Times that shrink are lowered by `lower_envelope`.
    """

    def __init__(self, points: Mapping[Point, float]) -> None:
        logs = {
            tuple(float(np.log(c)) for c in point): float(np.log(time))
            for point, time in lower_envelope(points).items()
        }
        size = len(next(iter(logs)))
        self._axes = [sorted({point[axis] for point in logs}) for axis in range(size)]
        self._values = _fill(logs, self._axes)

    def seconds(self, at: Sequence[float]) -> float:
        """Returns the time at a point."""
        beyond = 0.0
        cells: list[tuple[tuple[float, float], ...]] = []
        for axis, value in zip(self._axes, np.log(np.asarray(at, float)), strict=True):
            beyond += max(0.0, float(value) - axis[-1])
            cells.append(_cell(axis, min(max(float(value), axis[0]), axis[-1])))
        total = 0.0
        for corner in itertools.product(*cells):
            weight = float(np.prod([share for _, share in corner]))
            if weight:
                total += weight * self._values[tuple(place for place, _ in corner)]
        return float(np.exp(total + beyond))


def _cell(axis: Sequence[float], value: float) -> tuple[tuple[float, float], ...]:
    """Returns the neighbours of a value on an axis, with their shares."""
    if len(axis) == 1:
        return ((axis[0], 1.0),)
    upper = min(max(bisect_right(axis, value), 1), len(axis) - 1)
    low, high = axis[upper - 1], axis[upper]
    share = (value - low) / (high - low)
    return ((low, 1.0 - share), (high, share))


def _fill(points: dict[Point, float], axes: Sequence[Sequence[float]]) -> dict[Point, float]:
    """Completes a grid: each value that is added keeps the grid growing along every axis."""
    slopes = np.array([_slope(points, axis) for axis in range(len(axes))])
    places, values = [np.array(p) for p in points], list(points.values())
    measured = len(places)
    filled = dict(points)
    for node in itertools.product(*axes):
        if node in filled:
            continue
        place = np.array(node)
        known, times = np.array(places), np.array(values)
        nearest = int(np.abs(known[:measured] - place).sum(axis=1).argmin())
        estimate = times[nearest] + float(((place - known[nearest]) * slopes).sum())
        below = times[(known <= place).all(axis=1)]
        above = times[(known >= place).all(axis=1)]
        lowest = below.max() if below.size else -np.inf
        highest = above.min() if above.size else np.inf
        filled[node] = float(min(max(estimate, lowest), highest))
        places.append(place)
        values.append(filled[node])
    return filled


def _slope(points: Mapping[Point, float], axis: int) -> float:
    """Returns the mean growth of the logarithm along an axis, from points that differ only in it."""
    lines: dict[Point, list[tuple[float, float]]] = {}
    for point, value in points.items():
        lines.setdefault((*point[:axis], *point[axis + 1 :]), []).append((point[axis], value))
    rises = [(max(line)[1] - min(line)[1], max(line)[0] - min(line)[0]) for line in lines.values()]
    width = sum(w for _, w in rises)
    return float(np.clip(sum(r for r, _ in rises) / width, 0.0, 1.0)) if width else 1.0
