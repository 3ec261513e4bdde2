"""Which of several files is faster: runs in turns, the load of the machine, and how sure the answer is."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrace.benchmarking.files import NO_SLOWER
from qtrace.benchmarking.latency import rotate_order
from qtrace.benchmarking.runners import Runner, RunnerSettings, open_file
from qtrace.errors import ExportError

__all__ = ["Speed", "are_clear", "compare_files", "summarize", "watched_load"]

BUSY_SHARE = 0.25
"""The share of the processor from which on other programs change what is timed."""
_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # the columns of /proc/stat for idle and for waiting (proc_stat(5))
_GUESTS = 8  # the first column of times that count in others, too


@dataclass
class OtherWork:
    """What other programs took of the processor in a time.

    Attributes:
        share: their part of all cores, 0 to 1; 0 where that is unknown.
    """

    share: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether other programs may have changed the ratio of two times."""
        return self.share >= BUSY_SHARE


@contextmanager
def watched_load() -> Iterator[OtherWork]:
    """Measures what others take while a block runs; the result is there after the block.

    Programs that this process has started and that still run count as others.
    """
    work, start = OtherWork(), time.perf_counter()
    before, own = _busy_seconds(), time.process_time()
    yield work
    after, wall = _busy_seconds(), time.perf_counter() - start
    if before is not None and after is not None and wall > 0:
        others = after - before - (time.process_time() - own)
        work.share = min(max(others / (wall * (os.cpu_count() or 1)), 0.0), 1.0)


def _busy_seconds() -> float | None:
    """Returns the seconds that all cores have worked since the machine started; None if it does not say."""
    try:
        columns = _STAT.read_text(encoding="utf-8").splitlines()[0].split()[1:]
        ticks = [int(column) for column in columns[:_GUESTS]]
    except (OSError, IndexError, ValueError):
        return None
    worked = sum(t for column, t in enumerate(ticks) if column not in _IDLE)
    return worked / os.sysconf("SC_CLK_TCK")


_ROUNDS = 2
_LEAST_TURNS, _MOST_TURNS = 7, 400  # of a round
_FEWEST_TURNS = 3  # where there is no time for seven; with fewer, nothing could be said
_UNTIMED_RUNS = 2  # of each file, as it is opened and before the turns
LEAST_RUNS, FEWEST_RUNS = _LEAST_TURNS + _UNTIMED_RUNS, _FEWEST_TURNS + _UNTIMED_RUNS
"""The runs of a file that a round takes at least: with time enough, and with little time."""
# How far other programs may shift a ratio: a text detector took 0.94 of float's speed on an idle machine, and
# 0.89 to 0.93 next to eight programs on two cores.
_BUSY_RANGE = 1.1
_NARROW = 1.02  # the ends of a range of ratios, one over the other: more turns would decide nothing else
_SHOWN_RANGE = 1.1  # likewise: a wider range says too little to show
_LONG_RUN = 0.25  # seconds: files that take longer are opened once, and run seven times
_TURN = 0.002  # seconds of a turn; shorter files run several times in it
_MOST_RUNS = 20
_QUANTILE = 1.288  # 2.576 / 2: the ranks of the median's range, of 99 %, are so many roots from the middle
_STUDENT = {3: 9.925, 4: 5.841, 5: 4.604, 6: 4.032}  # turns -> the quantile of Student's range of 99 %


@dataclass(frozen=True)
class Speed:
    """How fast a file is compared with the first one.

    Attributes:
        seconds: the median time of a run.
        ratio: how many times as fast as the first file it is.
        low: the lower end of the range of ``ratio``, which holds it with 99 %.
        high: the upper end.
        turns: the number of turns.
        busy: whether other programs kept the machine busy meanwhile, for which the range is wider.
    """

    seconds: float
    ratio: float
    low: float
    high: float
    turns: int
    busy: bool = False

    @property
    def slower(self) -> bool:
        """Whether the file is slower than the first one beyond the spread of the measurement."""
        return self.high < NO_SLOWER

    @property
    def faster(self) -> bool:
        """Whether the file is faster than the first one beyond the spread of the measurement."""
        return self.low > 1 / NO_SLOWER

    @property
    def narrow(self) -> bool:
        """Whether the range of the ratio is narrow enough to be shown."""
        return self.high <= _SHOWN_RANGE * self.low

    @property
    def clear(self) -> bool:
        """Whether the range is narrow, and it is known which of both files is faster."""
        return self.narrow and (self.slower or self.faster)

    def describe(self) -> str:
        """Says how fast the file is, such as ``1.52x (1.48 to 1.55)``."""
        spread = f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"
        text = spread if self.slower or self.faster else f"no difference measured, {spread}"
        return f"{text}, as other programs kept the machine busy" if self.busy else text

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, for JSON."""
        return dict(vars(self))


Settled = Callable[[list[Speed]], bool]
"""Says by the speeds of files whether they decide what they are measured for."""


def compare_files(
    paths: Sequence[Path],
    *,
    runtime: str | None = None,
    settings: RunnerSettings | None = None,
    seconds: float = 2.0,
    most: float = 30.0,
    settled: Settled | None = None,
) -> list[Speed]:
    """Measures files in turns, the first of which is the reference.

    Args:
        paths: the files.
        runtime: the runtime; None for the first one that runs such files.
        settings: threads, batch and shapes.
        seconds: how long to measure all files together; each takes seven turns at least. A round ends
            earlier if the range of each ratio is narrower than 2 %.
        most: the seconds that slow files may take. Where seven turns take longer there are fewer, three at
            least, whose range is wider.
        settled: says whether more turns would decide nothing else, by the speeds so far; a round ends then,
            too, after seven turns. Each round is asked.

    Raises:
        ExportError: when a file cannot be run, or three turns take longer than ``most``.
    """
    settings = settings or RunnerSettings()

    def is_enough(times: list[list[float]]) -> bool:
        return _are_narrow(times) or (settled is not None and settled(summarize([*rounds, times])))

    start = time.perf_counter()
    end = start + most
    rounds: list[list[list[float]]] = []
    busy = False
    for number in range(_ROUNDS):
        began = time.perf_counter()
        runners = [open_file(paths[0], runtime, settings)]
        if number == 0:
            _refuse_slow(_clock(runners, settings)(runners[0]), paths, most)
        runners += [open_file(path, runtime, settings) for path in paths[1:]]
        opened = time.perf_counter()
        with watched_load() as load:
            rounds.append(_interleave(runners, _clock(runners, settings), seconds / _ROUNDS, end, is_enough))
        busy = busy or (load.is_busy and settings.host is None)  # a host's own work is others', too
        now = time.perf_counter()
        least = LEAST_RUNS * (now - opened) / (len(rounds[-1][0]) + 1)  # at most two more runs than turns
        if max(min(own) for own in rounds[0]) > _LONG_RUN or now + opened - began + least > end:
            break
    return summarize(rounds, busy)


def are_clear(speeds: Sequence[Speed]) -> bool:
    """Returns whether the speed of each file compared with the first one is clear."""
    return all(speed.clear for speed in speeds[1:])


def _refuse_slow(once: float, paths: Sequence[Path], most: float) -> None:
    """Refuses files that are too slow to be compared, by the time of one run of the first of them."""
    if len(paths) * FEWEST_RUNS * once > most:
        raise ExportError(
            f"a run of {paths[0].name} takes {once:.3g} s: {len(paths)} files cannot be compared within "
            f"{most:.3g} s, so measure them with `qtrace bench`."
        )


def _clock(runners: Sequence[Runner], settings: RunnerSettings) -> Callable[[Runner], float]:
    """Returns what times a run: processor time where all files run in this thread, else their own clock."""
    if settings.threads > 1 or not all(runner.in_thread for runner in runners):
        return lambda runner: runner.run()

    def run(runner: Runner) -> float:
        start = time.thread_time()
        runner.run()
        return time.thread_time() - start

    return run


def _interleave(
    runners: Sequence[Runner],
    clock: Callable[[Runner], float],
    seconds: float,
    latest: float,
    is_enough: Callable[[list[list[float]]], bool],
) -> list[list[float]]:
    """Returns the times of each file, one a turn, in the order of `rotate_order`.

    Args:
        runners: run the files.
        clock: times a run.
        seconds: how long to go on.
        latest: when to end, by the clock, though there are fewer turns than otherwise.
        is_enough: says by the times so far whether to end before.
    """
    first = [clock(runner) for runner in runners]  # allocates, too
    first = [t if t > _LONG_RUN else min(t, clock(runner)) for t, runner in zip(first, runners, strict=True)]
    repeats = [max(1, min(_MOST_RUNS, int(_TURN / max(t, 1e-7)))) for t in first]
    times: list[list[float]] = [[] for _ in runners]
    end = time.perf_counter() + seconds
    for number in range(_MOST_TURNS):
        began = time.perf_counter()
        for index in rotate_order(len(runners), number):
            runs = [clock(runners[index]) for _ in range(repeats[index])]
            times[index].append(statistics.median(runs))
        now = time.perf_counter()
        if number + 1 >= _LEAST_TURNS and (now > end or is_enough(times)):
            break
        if number + 1 >= _FEWEST_TURNS and now + (now - began) > latest:
            break
    return times


def _are_narrow(times: Sequence[Sequence[float]]) -> bool:
    """Returns whether the ranges of all ratios of a round are as narrow as any decision needs."""
    for own in times[1:]:
        low, high = _range_of_median([f / o for f, o in zip(times[0], own, strict=True)])
        if high > _NARROW * low:
            return False
    return True


def summarize(rounds: Sequence[Sequence[Sequence[float]]], busy: bool = False) -> list[Speed]:
    """Returns the speed of each file.

    Args:
        rounds: the rounds; in each, for each file its time in every turn.
        busy: whether other programs kept the machine busy.
    """
    speeds = []
    for index in range(len(rounds[0])):
        times = [seconds for each in rounds for seconds in each[index]]
        ratios = [[f / o for f, o in zip(each[0], each[index], strict=True)] for each in rounds]
        ranges = [_range_of_median(part) for part in ratios]
        ratio = statistics.median([r for part in ratios for r in part])
        disturbed = busy and index > 0  # the first file is compared with itself
        wider = _BUSY_RANGE if disturbed else 1.0
        low, high = min(r[0] for r in ranges) / wider, max(r[1] for r in ranges) * wider
        speeds.append(Speed(statistics.median(times), ratio, low, high, len(times), disturbed))
    return speeds


def _range_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Returns two of the values between which the median lies with 99 %.

    The ends of less than seven values say too little: theirs is the wider range of Student, of the mean of
    their logarithms.
    """
    ordered = sorted(values)
    if len(ordered) in _STUDENT:
        logs = [math.log(value) for value in ordered]
        half = min(_STUDENT[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs)), 50.0)
        middle = statistics.fmean(logs)
        return min(math.exp(middle - half), ordered[0]), max(math.exp(middle + half), ordered[-1])
    rank = max(math.floor(len(ordered) / 2 - _QUANTILE * math.sqrt(len(ordered))), 0)
    return ordered[rank], ordered[-1 - rank]
