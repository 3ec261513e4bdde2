"""Times calls: a speed is a ratio within one run, of sides that took turns in one process."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import megengine

from qtrace.benchmarking.runners import rotate_order

__all__ = ["Sample", "Samples", "Spread", "run_interleaved"]

Call = Callable[[], Any]


@dataclass(frozen=True)
class Sample:
    """One measured call, in seconds; ``cpu`` is the time of all threads of this process."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, value: float) -> Sample:
        """Returns a sample without processor time: of the wall clock alone, or of a value that is no time."""
        return cls(value, value)


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest value; ``cpu`` is the median by processor time."""

    median: float
    low: float
    high: float
    cpu: float

    @classmethod
    def of(cls, values: Iterable[Sample]) -> Spread:
        """Summarises samples, or ratios of samples."""
        values = list(values)
        walls = [v.wall for v in values]
        return cls(statistics.median(walls), min(walls), max(walls), statistics.median(v.cpu for v in values))


class Samples:
    """The result of ``run_interleaved``: side -> one sample for each round."""

    def __init__(self, by_side: dict[str, list[Sample]]) -> None:
        self.by_side = by_side

    def seconds(self, side: str, per: float = 1.0) -> Spread:
        """Time of one side, divided by ``per`` (0.001 gives milliseconds)."""
        return Spread.of(Sample(s.wall / per, s.cpu / per) for s in self.by_side[side])

    def ratio(self, side: str, unit: str) -> Spread:
        """The ratios of two sides, taken round by round: what slows one round down slows both sides."""
        pairs = zip(self.by_side[side], self.by_side[unit], strict=True)
        return Spread.of(Sample(a.wall / b.wall, a.cpu / b.cpu) for a, b in pairs)


def run_interleaved(sides: Mapping[str, Call], repeats: int, warm_up: int = 1) -> Samples:
    """Calls all sides in turns, ``repeats`` times.

    No side runs twice in a row, when it would be faster.

    Args:
        sides: name -> what to measure.
        repeats: the number of rounds that count.
        warm_up: the number of rounds before them.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    enabled = gc.isenabled()
    try:
        for number in range(warm_up + repeats):
            # Garbage of one side must not be collected at the cost of another.
            gc.collect()
            gc.disable()
            names = list(sides)
            for name in (names[index] for index in rotate_order(len(names), number)):
                sample = _measure(sides[name])
                if number >= warm_up:
                    samples[name].append(sample)
            gc.enable()
    finally:
        if not enabled:
            gc.disable()
        else:
            gc.enable()
    return Samples(samples)


def _measure(call: Call) -> Sample:
    megengine._full_sync()
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    megengine._full_sync()  # calls return before their kernels have run
    sample = Sample(time.perf_counter() - wall, time.process_time() - cpu)
    del result  # freed after the clock has stopped
    return sample
