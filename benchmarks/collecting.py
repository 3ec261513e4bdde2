"""Whole calibrations of 256 images beside onnxruntime's own, and two workers beside one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from megengine import Tensor
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, create_calibrator

import qtrace
from benchmarks.nets import ResNet18, image_batches, settle
from benchmarks.rows import Row, Size
from benchmarks.timing import Sample, Samples, run_interleaved
from qtrace.calibration.choice import Chosen
from qtrace.calibration.running import LocalCollection, Source, WorkerJob
from qtrace.graph.types import TracedModule
from qtrace.workers import Processes

__all__ = ["run"]

# Of two workers on two cores, beside one's.
_THROUGHPUT = 1.7
_TARGETS = {"minmax": 1.0, "percentile": 1.1, "mse": 1.1}


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, name: str, batches: list[np.ndarray]) -> None:
        self.name, self.left = name, iter(batches)

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self.left, None)
        return None if batch is None else {self.name: batch}


def run(size: Size) -> Iterator[Row]:
    """Times calibration from the prepared graph, or the ONNX file, to the last range."""
    count = 4 * size.batches
    batches = [batch.numpy() for batch in image_batches(count, size.image)]
    net = settle(ResNet18(size.width), Tensor(batches[0]))
    traced = qtrace.trace(net, batches[0], check=False)
    with tempfile.TemporaryDirectory() as folder:
        yield from _beside_onnxruntime(traced, batches, Path(folder), size)
        yield from _workers(traced, batches, Path(folder), size)


def _beside_onnxruntime(
    traced: TracedModule, batches: list[np.ndarray], folder: Path, size: Size
) -> Iterator[Row]:
    sides: dict[str, Callable[[], Any]] = {}
    for observer in _TARGETS:
        prepared = qtrace.prepare(traced, {"observers": {"activation": observer}})
        sides[observer] = lambda p=prepared: qtrace.calibrate(p, batches, progress=False)
    first = qtrace.prepare(traced)
    float_file = qtrace.export(
        qtrace.convert(qtrace.calibrate(first, batches[:1], progress=False)),
        folder / "float.onnx",
        format="onnx_float",
    )

    def theirs() -> Any:
        calibrator = create_calibrator(
            str(float_file), None, str(folder / "augmented.onnx"), CalibrationMethod.MinMax
        )
        calibrator.collect_data(_Reader("x", batches))
        return calibrator.compute_data()

    sides["onnxruntime"] = theirs
    samples = run_interleaved(sides, size.slow_repeats)
    images = len(batches) * size.image[0]
    for observer, target in _TARGETS.items():
        title = f"{size.net}: calibrate, {images} images, auto, {observer} / onnxruntime.quantization MinMax"
        yield Row(title, samples.ratio(observer, "onnxruntime"), "x", target)
    yield Row(f"{size.net}: onnxruntime.quantization MinMax", samples.seconds("onnxruntime"), "s")


def _workers(traced: TracedModule, batches: list[np.ndarray], folder: Path, size: Size) -> Iterator[Row]:
    """Times a batch with one and with two workers, without their start."""
    np.save(folder / "x.npy", np.concatenate(batches))
    prepared = qtrace.prepare(traced, {"observers": {"activation": "minmax"}})
    qtrace.save(prepared, folder / "prepared.mge")
    source = Source(str(folder / "x.npy"), batch_size=size.image[0])
    for engine in ("megengine", "onnxruntime"):
        rounds: dict[str, list[Sample]] = {"1": [], "2": []}
        for _ in range(max(1, size.slow_repeats // 2)):
            for workers in (1, 2):
                seconds = _steady(folder, source, workers, engine)
                rounds[str(workers)].append(Sample.of(seconds))
        title = f"{size.net}: seconds a batch, 2 workers / 1 worker, {engine} on one thread"
        yield Row(title, Samples(rounds).ratio("2", "1"), "x", 1 / _THROUGHPUT)
    yield _alone(size)


def _alone(size: Size) -> Row:
    """Times float forwards alone, in one process and in two: the bound that the machine sets."""
    rounds: dict[str, list[Sample]] = {"1": [], "2": []}
    for _ in range(max(1, size.slow_repeats // 2)):
        for count in (1, 2):
            command = [sys.executable, "-c", _FORWARDS, str(size.width), str(size.image)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            running = [subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes) for _ in range(count)]
            for process in running:  # all begin when the last one is ready
                assert process.stdout is not None
                process.stdout.readline()
            seconds = [float(process.communicate("\n")[0]) for process in running]
            rounds[str(count)].append(Sample.of(max(seconds) / count))
    title = f"{size.net}: seconds a float forward of MegEngine, 2 processes / 1 process"
    return Row(title, Samples(rounds).ratio("2", "1"), "x", note="what the machine gives")


# Arguments: width, shape of a batch.
_FORWARDS = """
import ast, sys, time
from benchmarks.nets import ResNet18, image_batches, settle

batch = image_batches(1, ast.literal_eval(sys.argv[2]))[0]
net = settle(ResNet18(int(sys.argv[1])), batch)
net(batch).numpy()
print(flush=True)
sys.stdin.readline()
start = time.perf_counter()
for _ in range(20):
    net(batch).numpy()
print(time.perf_counter() - start)
"""


def _steady(folder: Path, source: Source, workers: int, engine: str) -> float:
    """Seconds a batch: the workers' rates from their first batch to their last, added."""
    model, chosen = str(folder / "prepared.mge"), Chosen(engine, "as asked")
    jobs = [
        WorkerJob(model, (), source, i, workers, (), chosen, 1, str(folder / f"{i}.part.npz"), "benchmark")
        for i in range(workers)
    ]
    ticks: list[list[float]] = [[] for _ in range(workers)]
    with Processes(LocalCollection(), workers, saves=True) as pool:
        for outcome in pool.run(jobs, lambda number: ticks[number % workers].append(time.perf_counter())):
            outcome.get()
    return 1.0 / sum((len(t) - 1) / (t[-1] - t[0]) for t in ticks)
