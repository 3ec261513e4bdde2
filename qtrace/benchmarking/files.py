"""``qtrace bench FILE...``: latency, size, memory and profile of files side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtrace.benchmarking.latency import Latency, file_size, take_turns
from qtrace.benchmarking.memory import peak_memory
from qtrace.benchmarking.onnx_ops import read_graph
from qtrace.benchmarking.prediction import Prediction, predict
from qtrace.benchmarking.profile import FLOAT_OPS, INTEGER_OPS, LAYOUT, ROUNDINGS, Profile, read_profile
from qtrace.benchmarking.runners import RunnerSettings, open_file
from qtrace.benchmarking.runners.onnxruntime import OnnxRunner
from qtrace.costs import CostTable
from qtrace.errors import ExportError
from qtrace.runtimes.host import describe_side

__all__ = ["NO_SLOWER", "FileReport", "bench_files", "list_shares", "show"]

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
        if by_op and not isinstance(runner, OnnxRunner):
            raise ExportError(f"{path.name} runs in a runtime without a profile: leave out --by-op.")
    reports = []
    latencies = take_turns(runners, seconds * len(paths), tick)
    for path, runner, latency in zip(paths, runners, latencies, strict=True):
        slower = latency.ratio < NO_SLOWER
        profile = prediction = None
        if isinstance(runner, OnnxRunner):
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
