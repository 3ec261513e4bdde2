"""The times of files that take turns in their runtimes, and their report."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtrace.benchmarking.prediction import Prediction, predict, read_graph
from qtrace.benchmarking.profile import FLOAT_OPS, INTEGER_OPS, LAYOUT, ROUNDINGS, Profile, read_profile
from qtrace.benchmarking.runners import (
    Latency,
    ProfiledRunner,
    Runner,
    RunnerSettings,
    file_size,
    open_file,
    peak_memory,
    rotate_order,
    run_interleaved,
)
from qtrace.costs import CostTable
from qtrace.display import Displayed, megabytes, progress_bar
from qtrace.errors import ExportError
from qtrace.plugins.options import check_arguments
from qtrace.runtimes.host import RuntimeHost, describe_side

BUSY_SHARE = 0.25
"""The share of the processor from which on other programs change what is timed."""
_STAT = Path("/proc/stat")
# The other columns of /proc/stat count in these, see proc_stat(5).
_COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


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
        numbers = _STAT.read_text(encoding="utf-8").splitlines()[0].split()[1:]
        ticks = {name: int(number) for name, number in zip(_COLUMNS, numbers, strict=False)}
    except (OSError, IndexError, ValueError):
        return None
    worked = sum(number for name, number in ticks.items() if name not in ("idle", "iowait"))
    return worked / os.sysconf("SC_CLK_TCK")


_ROUNDS = 2
_LEAST_TURNS = 7  # of a round
_UNTIMED_RUNS = 2  # of each file, as it is opened and before the turns
_FEWEST_TURNS = 3  # where there is no time for seven; with fewer, nothing could be said
# How far other programs may shift a ratio: a text detector took 0.94 of float's speed on an idle machine, and
# 0.89 to 0.93 next to eight programs on two cores.
_BUSY_RANGE = 1.1
_TURN = 0.002  # seconds of a turn; shorter files run several times in it
_UPPER = 0.995  # the quantile at the upper end of a range that holds a ratio with 99 %


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
        return self.high <= _BUSY_RANGE * self.low

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
        least = _LEAST_TURNS * (now - opened) / len(rounds[-1][0])
        long = max(min(own) for own in rounds[0]) > seconds / _ROUNDS / _LEAST_TURNS
        if long or now + opened - began + least > end:
            break
    return summarize(rounds, busy)


def are_clear(speeds: Sequence[Speed]) -> bool:
    """Returns whether the speed of each file compared with the first one is clear."""
    return all(speed.clear for speed in speeds[1:])


def _refuse_slow(once: float, paths: Sequence[Path], most: float) -> None:
    """Refuses files that are too slow to be compared, by the time of one run of the first of them."""
    if len(paths) * (_FEWEST_TURNS + _UNTIMED_RUNS) * once > most:
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
    long = seconds / _LEAST_TURNS  # the least turns do not fit
    first = [t if t > long else min(t, clock(runner)) for t, runner in zip(first, runners, strict=True)]
    repeats = [max(1, int(_TURN / max(t, 1e-7))) for t in first]
    times: list[list[float]] = [[] for _ in runners]
    end = time.perf_counter() + seconds
    for number in itertools.count():
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
        if NO_SLOWER * high > low:
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
    if 1 < len(ordered) < _LEAST_TURNS:
        from scipy.special import stdtrit

        logs = [math.log(value) for value in ordered]
        half = min(
            float(stdtrit(len(logs) - 1, _UPPER)) * statistics.stdev(logs) / math.sqrt(len(logs)), 50.0
        )
        middle = statistics.fmean(logs)
        return min(math.exp(middle - half), ordered[0]), max(math.exp(middle + half), ordered[-1])
    deviation = statistics.NormalDist().inv_cdf(_UPPER) * math.sqrt(len(ordered)) / 2  # of the median's rank
    rank = max(math.floor(len(ordered) / 2 - deviation), 0)
    return ordered[rank], ordered[-1 - rank]


NO_SLOWER = 0.98  # of the speed of the first file: less is slower, not disturbed


@dataclass(frozen=True)
class FileReport:
    """What was measured of one file.

    Attributes:
        path: the file.
        size: its bytes.
        memory: the bytes that it adds to a process at most; None if that was not measured.
        latency: its times.
        profile: the times of its nodes; None if they were not asked for, or the runtime lacks a profile.
        prediction: the time that a cost table predicts; None if that was not asked for.
        side: versions and machine of a runtime on another host; empty for one in this interpreter.
    """

    path: Path
    size: int
    memory: int | None
    latency: Latency
    profile: Profile | None = None
    prediction: Prediction | None = None
    side: Mapping[str, Any] = field(default_factory=dict)

    @property
    def slower(self) -> bool:
        """Whether the file is slower than the first one."""
        return self.latency.ratio < NO_SLOWER

    def reason(self) -> str:
        """Says why a file may be slower than another: what its time goes to besides integer kernels."""
        if self.profile is None:
            return f"{self.path.name} is slower than the first file."
        times = self.profile.by_sort()
        shares = {sort: times.get(sort, 0.0) for sort in (ROUNDINGS, FLOAT_OPS, LAYOUT, INTEGER_OPS)}
        return f"{self.path.name} is slower than the first file: of its time, {list_shares(shares)}."

    def to_dict(self) -> dict[str, Any]:
        """Returns everything, for JSON."""
        facts: dict[str, Any] = {"file": str(self.path), "size": self.size, "memory": self.memory}
        facts["latency"] = self.latency.to_dict()
        facts["profile"] = None if self.profile is None else self.profile.to_dict()
        facts["predicted_seconds"] = None if self.prediction is None else self.prediction.seconds
        facts["runtime_host"] = dict(self.side) or None
        facts["slower"] = self.slower
        facts["reason"] = self.reason() if self.slower else ""
        return facts


def bench_files(
    paths: Sequence[Path],
    *,
    runtime: str | None = None,
    settings: RunnerSettings | None = None,
    seconds: float = 3.0,
    by_op: bool = False,
    table: CostTable | None = None,
    tick: Callable[[], None] = lambda: None,
) -> list[FileReport]:
    """Measures files that take turns, the first of which is the reference.

    Args:
        paths: the files.
        runtime: the runtime; None for the first one that runs such files.
        settings: threads, batch and shapes.
        seconds: the seconds for each file.
        by_op: whether the time of each node is measured, too; only onnxruntime has a profile.
        table: predicts the time of each ONNX file.
        tick: called after each round.

    Raises:
        ExportError: when a file cannot be run, or its runtime lacks a profile.
    """
    settings = settings or RunnerSettings()
    runners = [open_file(path, runtime, settings) for path in paths]
    for path, runner in zip(paths, runners, strict=True):
        if by_op and not isinstance(runner, ProfiledRunner):
            raise ExportError(f"{path.name} runs in a runtime without a profile: leave out --by-op.")
    reports = []
    latencies = run_interleaved(runners, seconds * len(paths), tick)
    for path, runner, latency in zip(paths, runners, latencies, strict=True):
        slower = latency.ratio < NO_SLOWER
        profile = prediction = None
        if isinstance(runner, ProfiledRunner):
            if by_op or slower:
                profile = read_profile(runner.profile(_LEAST_TURNS))
            if table is not None:
                prediction = predict(read_graph(path, runner.shapes), table)
        memory = peak_memory(path, runtime, settings)
        side = getattr(runner, "side", {})
        reports.append(FileReport(path, file_size(path), memory, latency, profile, prediction, side))
    return reports


def list_shares(seconds: Mapping[str, float]) -> str:
    """Lists what share of the whole time each sort of node takes, such as ``40% in Q/DQ``."""
    whole = sum(seconds.values()) or 1.0
    return ", ".join(
        f"{time / whole:.0%} in {sort}" for sort, time in seconds.items() if time / whole >= 0.01
    )


def show(reports: Sequence[FileReport], by_op: bool) -> str:
    """Returns a table of all files, the reasons why some are slower, and their profiles."""
    width = max(len(report.path.name) for report in reports)
    head = f"{'':{width}}   min ms   median     10 %     90 %   speed  samples/s size MB  mem. MB"
    predicted = any(report.prediction is not None for report in reports)
    lines = [head + ("  predicted" if predicted else "")]
    for report in reports:
        lines.append(f"{report.path.name:{width}}  {_figures(report)}")
    lines += [report.reason() for report in reports if report.slower]
    lines += list(dict.fromkeys(f"runtime: {describe_side(r.side)}" for r in reports if r.side))
    if by_op:
        for report in reports:
            if report.profile is not None:
                lines += ["", f"{report.path.name}, by onnxruntime's profile:", report.profile.table()]
    return "\n".join(lines)


def _figures(report: FileReport) -> str:
    latency = report.latency
    times = [_milliseconds(t) for t in (latency.minimum, latency.median, latency.low, latency.high)]
    memory = "      ?" if report.memory is None else f"{megabytes(report.memory):7.1f}"
    line = (
        f"{' '.join(times)} {latency.ratio:6.2f}x {latency.throughput:10.1f} "
        f"{megabytes(report.size):7.1f}  {memory}"
    )
    if report.prediction is None:
        return line
    error = report.prediction.seconds / latency.minimum - 1
    return f"{line}  {_milliseconds(report.prediction.seconds)} ({error:+.0%})"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:8.3f}"


@dataclass(frozen=True, repr=False)
class BenchReport(Displayed):
    """The result of ``qtrace.bench``.

    Attributes:
        files: what was measured of each file; the speed of each is given against the first one.
        threads: the threads of the runtime.
        by_op: whether the time of each node was asked for.
    """

    files: tuple[FileReport, ...]
    threads: int
    by_op: bool

    def table(self) -> str:
        """Returns a table of all files, the reasons why some are slower, and their profiles."""
        return show(self.files, self.by_op)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything, for JSON."""
        return {"threads": self.threads, "files": [report.to_dict() for report in self.files]}


@check_arguments
def bench(
    *files: str | os.PathLike[str],
    runtime: str | None = None,
    runtime_host: RuntimeHost | None = None,
    threads: int = 1,
    batch: int = 1,
    shapes: Mapping[str, Sequence[int]] | None = None,
    seconds: float = 3.0,
    by_op: bool = False,
    predict: CostTable | None = None,
    progress: bool = True,
) -> BenchReport:
    """Measures how fast exported files run on this machine, as ``qtrace bench`` does.

    Several files take turns, and the speed of each is given against the first one.

    Args:
        *files: the files.
        runtime: the runtime, such as ``openvino``; None for the first one that runs such files.
        runtime_host: the interpreter or machine that has the runtime, where it is timed; None for this one.
        threads: threads of the runtime.
        batch: samples of a run, if the file leaves them open.
        shapes: shape of each input that the file leaves open.
        seconds: how long to run each file, in seconds; at least 9 runs are made.
        by_op: whether to measure the time of each node, by onnxruntime's own profile.
        predict: a table of measured times, to predict the time of ONNX files, too.
        progress: whether to show a progress bar on stderr.

    Raises:
        ExportError: when a file cannot be run, or its runtime lacks a profile.
    """
    if not files:
        raise ExportError("bench measures files: give at least one.")
    for name, value in (("threads", threads), ("batch", batch)):
        if type(value) is not int or value < 1:
            raise ExportError(f"{name}={value!r} is no number of {name}: give 1 or more.")
    if not seconds >= 0:
        raise ExportError(f"seconds={seconds!r} is no time: give 0 or more.")
    if not all(isinstance(file, (str, os.PathLike)) for file in files):
        raise ExportError("bench takes the paths of files, each by itself: bench('a.onnx', 'b.onnx').")
    sizes = {name: tuple(int(n) for n in shape) for name, shape in (shapes or {}).items()}
    settings = RunnerSettings(threads, batch, sizes, runtime_host)
    with progress_bar(desc="bench", unit="runs of each file", disable=not progress) as bar:
        reports = bench_files(
            tuple(Path(file) for file in files),
            runtime=runtime,
            settings=settings,
            seconds=seconds,
            by_op=by_op,
            table=predict,
            tick=bar.update,
        )
    return BenchReport(tuple(reports), threads, by_op)
