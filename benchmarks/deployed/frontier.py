"""The frontier between time and noise: how its points are prepared, and its picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from benchmarks.deployed.rows import PEERS, PLACEMENTS, POINTS, Row
from qtrace.preparation.passes import choosing
from qtrace.preparation.placement.frontier import Point, find_frontier, in_float
from qtrace.preparation.placement.problem import Problem

__all__ = ["choose_between", "draw", "select"]

# Point -> its share of the way from the fastest predicted time to that of float.
SHARES = dict(zip(POINTS, (0.08, 0.2, 0.35, 0.55, 0.8), strict=True))


def select(frontier: Sequence[Point], float_seconds: float, share: float) -> Point:
    """Returns the point whose time is ``share`` of the way from the fastest one to float's.

    Points without any integer op are no choice, nor are those slower than float, unless there is no other.
    """
    usable = [p for p in frontier if any(p.labels.values()) and p.energy.seconds < float_seconds]
    if not usable:
        return frontier[0]
    wanted = usable[0].energy.seconds + share * (float_seconds - usable[0].energy.seconds)
    return min(usable, key=lambda point: abs(point.energy.seconds - wanted))


@contextmanager
def choose_between(share: float) -> Iterator[None]:
    """Lets a balanced placement take the point of the frontier at ``share`` instead of its own choice."""

    taken: list[float] = []

    def choose(problem: Problem, most_noise: float) -> Point:
        point = select(find_frontier(problem), in_float(problem).energy.seconds, share)
        taken.append(point.energy.seconds)
        return point

    def price(seconds: float, noise: float) -> float:
        return abs(seconds - taken[-1])

    with mock.patch.multiple(choosing, choose_balanced=choose, price=price):
        yield


def draw(net: str, rows: Iterable[Row], file: Path) -> Path | None:
    """Draws speed and SQNR of all files of a network; None if it has no points.

    Args:
        net: the network.
        rows: the stored rows.
        file: the PNG to write.
    """
    measured = [r for r in rows if r.net == net and r.sqnr is not None and r.speed is not None]
    points = [r for r in measured if r.variant in (*POINTS, *PLACEMENTS)]
    if not any(r.variant in POINTS for r in points):
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    line = sorted((r for r in points if r.variant != "everything"), key=lambda r: r.speed or 0.0)
    axes.plot([r.speed for r in line], [r.sqnr for r in line], "-", color="tab:blue", alpha=0.4)
    axes.plot([r.speed for r in points], [r.sqnr for r in points], "o", color="tab:blue", label="qtrace")
    peers = [r for r in measured if r.variant in PEERS]
    axes.plot([r.speed for r in peers], [r.sqnr for r in peers], "s", color="tab:red", label="other tools")
    axes.margins(x=0.18, y=0.1)
    for text, speed, sqnr in _labels([*(r for r in points if r.variant in PLACEMENTS), *peers]):
        axes.annotate(text, (speed, sqnr), textcoords="offset points", xytext=(6, 4), fontsize=7)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("speed against float, one thread")
    axes.set_ylabel("SQNR of the outputs, dB")
    axes.set_title(net)
    axes.legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Software": None})
    return file


def _labels(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Returns texts with their places; rows that stand close to each other have one text, a line each."""
    places = [(r.variant, r.speed or 0.0, r.sqnr or 0.0) for r in rows]
    spans = [max(p[i] for p in places) - min(p[i] for p in places) or 1.0 for i in (1, 2)]
    labels: list[tuple[str, float, float]] = []
    for name, speed, sqnr in sorted(places, key=lambda place: -place[2]):
        near = [n for n, (_, x, y) in enumerate(labels) if _near((x - speed, y - sqnr), spans)]
        if near:
            text, x, y = labels[near[0]]
            labels[near[0]] = (f"{name}\n{text}", x, y)  # upwards, where there is room
        else:
            labels.append((name, speed, sqnr))
    return labels


def _near(apart: tuple[float, float], spans: Sequence[float]) -> bool:
    return all(abs(distance) <= 0.05 * span for distance, span in zip(apart, spans, strict=True))
