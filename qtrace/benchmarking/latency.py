"""Latency of files, which take turns so that other work on the machine slows all of them alike."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.benchmarking.runners import Runner

__all__ = ["Latency", "file_size", "rotate_order", "run_interleaved"]

_LEAST_ROUNDS, _MOST_ROUNDS = 9, 2000


@dataclass(frozen=True)
class Latency:
    """The times of one file.

    Attributes:
        minimum: the seconds of the fastest run.
        median: the median.
        low: the 10th percentile.
        high: the 90th percentile.
        runs: the number of runs.
        throughput: the samples of a second, by the median.
        ratio: how many times as fast as the first file it is: the median of the ratios of single rounds.
    """

    minimum: float
    median: float
    low: float
    high: float
    runs: int
    throughput: float
    ratio: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, for JSON."""
        return dict(vars(self))


def rotate_order(count: int, number: int) -> list[int]:
    """Returns the order in which files run in a turn, which lets none run twice in a row.

    A file that does is faster, probably as caches have its data: ResNet-18 at 96x96 took 2.9 ms after another
    file, and 1.4 ms after five runs of its own. Each turn begins with the next file, so that a machine that
    slows down steadily favours none. Of two files one would then run twice in a row: their order stays.

    Args:
        count: the number of files.
        number: the number of the turn.
    """
    start = number % count if count > 2 else 0
    return [*range(start, count), *range(start)]


def run_interleaved(
    runners: Sequence[Runner], seconds: float, tick: Callable[[], None] = lambda: None
) -> list[Latency]:
    """Runs all files in turns and returns the latency of each.

    The order comes from `rotate_order`.

    Args:
        runners: the files, the first of which is the reference of the ratios.
        seconds: how long to measure; at least 9 rounds are made.
        tick: called after each round.
    """
    for runner in runners:
        runner.run()  # allocates
    times: list[list[float]] = [[] for _ in runners]
    end = time.perf_counter() + seconds
    for number in range(_MOST_ROUNDS):
        for index in rotate_order(len(runners), number):
            times[index].append(runners[index].run())
        tick()
        if number + 1 >= _LEAST_ROUNDS and time.perf_counter() > end:
            break
    return [_summarize(own, times[0], runner.samples) for own, runner in zip(times, runners, strict=True)]


def _summarize(own: Sequence[float], first: Sequence[float], samples: int) -> Latency:
    median = statistics.median(own)
    low, high = np.percentile(own, [10, 90])
    ratio = statistics.median(f / o for f, o in zip(first, own, strict=True))
    return Latency(min(own), median, float(low), float(high), len(own), samples / median, ratio)


def file_size(path: Path) -> int:
    """Returns the bytes of a model file and of the files of weights that stand next to it."""
    beside = (
        path.with_suffix(".bin") if path.suffix.lower() == ".param" else path.with_name(f"{path.name}.data")
    )
    return sum(os.path.getsize(file) for file in (path, beside) if file.is_file())
