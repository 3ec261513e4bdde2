"""What is asked of exported files: how fast they run, and whether they keep a target's contract."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrace.benchmarking.files import FileReport, bench_files, show
from qtrace.benchmarking.runners import RunnerSettings
from qtrace.costs import CostTable
from qtrace.display import Displayed, progress_bar
from qtrace.errors import ExportError
from qtrace.onnxfile.contracts import check_contract, fix_contract
from qtrace.onnxfile.contracts.report import ContractReport
from qtrace.plugins.arguments import check_arguments
from qtrace.runtimes.host import RuntimeHost
from qtrace.storage.outputs import output_file

__all__ = ["BenchReport", "bench", "check_file_for"]


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
        ExportError: when a file cannot be run, or its runtime has no profile.
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


@check_arguments
def check_file_for(
    file: str | os.PathLike[str],
    target: str,
    *,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    runtime_host: RuntimeHost | None = None,
) -> ContractReport:
    """Checks whether a quantized ONNX file keeps the contract of a target, as ``qtrace check`` does.

    Args:
        file: an ONNX file with QuantizeLinear and DequantizeLinear nodes, of any tool.
        target: ``onnxruntime``, ``qnn``, ``ryzenai``, ``ryzenai_xint8`` or ``tensorrt``.
        out: where to write a copy in which all that is mechanical is repaired; None for no copy.
        force: whether ``out`` may replace a file of another tool.
        runtime_host: the interpreter or machine whose onnxruntime says which ops compute in float, for the
            target ``onnxruntime``; None for this one.

    Returns:
        The violations with their rules and cures, and the ops that compute in float.

    Raises:
        ExportError: for a file that cannot be read or is not quantized, or an unknown target.
        QtraceError: when ``out`` cannot be written.
    """
    if out is None:
        return check_contract(Path(file), target, runtime_host)
    data, report = fix_contract(Path(file), target, runtime_host)
    with output_file(Path(out), force=force) as partial:
        Path(partial).write_bytes(data)
    return report
