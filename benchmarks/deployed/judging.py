"""What is measured of a file: noise, speed beside float, predicted time, and parity with its graph."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import qtrace
from benchmarks.timing import Spread, run_interleaved
from qtrace.benchmarking.prediction import predict, read_graph
from qtrace.comparing.sums import ErrorSums
from qtrace.costs import CostTable
from qtrace.onnxfile.local_session import OrtSession, SessionSettings
from qtrace.onnxfile.sessions import open_session

__all__ = ["File", "faster", "judge_parity", "measure_noise", "measure_speed", "predict_milliseconds"]

ROUNDS = 15
_WARM_UP = 3
_LEAST_SECONDS = 0.05  # of a turn
_BATCH = 4
_VERIFIED = 2  # samples


class File:
    """An ONNX file in onnxruntime, with all optimizations, on one thread and on two."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sessions: dict[int, OrtSession] = {}

    def run(self, batch: np.ndarray, threads: int = 1) -> list[np.ndarray]:
        """Returns all outputs."""
        if threads not in self.sessions:
            self.sessions[threads] = open_session(self.path, SessionSettings(threads=threads))
        session = self.sessions[threads]
        return session.run(None, {session.inputs[0].name: batch})

    __call__ = run


@dataclass(frozen=True)
class Speed:
    """The speed of a file.

    Attributes:
        ratio: time of float / time of the file: median, smallest and largest.
        milliseconds: median time of a run.
    """

    ratio: tuple[float, float, float]
    milliseconds: float


def measure_speed(exact: File, file: File, sample: np.ndarray, threads: int) -> Speed:
    """Times a file beside float, in turns."""
    runs = _runs_in_a_turn(exact, sample, threads)
    sides = {"float": _turn(exact, sample, threads, runs), "file": _turn(file, sample, threads, runs)}
    samples = run_interleaved(sides, ROUNDS, warm_up=_WARM_UP)
    return Speed(_triple(samples.ratio("float", "file")), samples.seconds("file", 1e-3 * runs).median)


def faster(files: Sequence[File], sample: np.ndarray) -> File:
    """Returns the fastest of some files, on one thread."""
    runs = _runs_in_a_turn(files[0], sample, 1)
    sides = {str(i): _turn(file, sample, 1, runs) for i, file in enumerate(files)}
    samples = run_interleaved(sides, ROUNDS, warm_up=_WARM_UP)
    return files[int(min(sides, key=lambda side: samples.seconds(side).median))]


def _turn(file: File, sample: np.ndarray, threads: int, runs: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(runs):
            file.run(sample, threads)

    return run


def _runs_in_a_turn(file: File, sample: np.ndarray, threads: int) -> int:
    """Returns how many runs make a turn.

    The first side of a round finds its data evicted from the caches by the garbage collection before it,
    which costs a small network more than its run.
    """
    file.run(sample, threads)  # allocates
    start = time.perf_counter()
    file.run(sample, threads)
    return max(1, math.ceil(_LEAST_SECONDS / (time.perf_counter() - start)))


def measure_noise(exact: File, file: File, test: np.ndarray) -> float:
    """Returns the SQNR of all outputs, in dB."""
    sums = ErrorSums()
    for start in range(0, len(test), _BATCH):
        batch = test[start : start + _BATCH]
        for reference, output in zip(exact.run(batch), file.run(batch), strict=True):
            sums.add(reference, output)
    return float(sums.sqnr_db)


def predict_milliseconds(file: Path, sample: np.ndarray, cost_table: Path | None) -> float:
    """Predicts the time of a run by a cost table; None for the packaged one."""
    import onnx

    name = onnx.load(str(file), load_external_data=False).graph.input[0].name
    graph = read_graph(file, {name: sample.shape})
    table = CostTable.load("onnxruntime") if cost_table is None else CostTable.read(cost_table)
    return 1e3 * predict(graph, table).seconds


def judge_parity(file: Path, converted: Any, test: np.ndarray) -> tuple[int, float]:
    """Returns the worst LSB and the share of equal integers, op by op, without optimizations."""
    report = qtrace.verify(file, converted, [test[:_VERIFIED]], optimized=False)
    tallies = report.sites["op_by_op"].values()
    values = sum(tally.values for tally in tallies)
    equal = sum(tally.equal for tally in tallies)
    return max((tally.worst for tally in tallies), default=0), equal / values if values else 1.0


def _triple(spread: Spread) -> tuple[float, float, float]:
    return spread.median, spread.low, spread.high
