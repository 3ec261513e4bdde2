"""``qtrace bench FILE...``: latency, size, memory and profile of files side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtrace.benchmarking.latency import Latency, file_size, run_interleaved
from qtrace.benchmarking.machine import peak_memory
from qtrace.benchmarking.onnx_ops import read_graph
from qtrace.benchmarking.prediction import Prediction, predict
from qtrace.benchmarking.profile import FLOAT_OPS, INTEGER_OPS, LAYOUT, ROUNDINGS, Profile, read_profile
from qtrace.benchmarking.runners import ProfiledRunner, RunnerSettings, open_file
from qtrace.costs import CostTable
from qtrace.display import Displayed, progress_bar
from qtrace.errors import ExportError
from qtrace.plugins.arguments import check_arguments
from qtrace.runtimes.host import RuntimeHost, describe_side

__all__ = ["NO_SLOWER", "BenchReport", "FileReport", "bench", "bench_files", "list_shares", "show"]

_PROFILED_RUNS = 15
NO_SLOWER = 0.98  # of the speed of the first file: less is slower, not disturbed
_MEBIBYTE = 2**20


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
                profile = read_profile(runner.profile(_PROFILED_RUNS))
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
    memory = "      ?" if report.memory is None else f"{report.memory / _MEBIBYTE:7.1f}"
    line = (
        f"{' '.join(times)} {latency.ratio:6.2f}x {latency.throughput:10.1f} "
        f"{report.size / _MEBIBYTE:7.1f}  {memory}"
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
