"""Times other tools at the same work, each in an interpreter of its own: NNCF and torch.ao."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from megengine import Tensor

import qtrace
from benchmarks.nets import ResNet18, image_batches, settle
from benchmarks.rows import Row, Size
from benchmarks.timing import Sample, Samples, Spread, run_interleaved

__all__ = ["run"]

_WORKERS = Path(__file__).parent / "workers"


def run(size: Size) -> Iterator[Row]:
    """Whole calibrations beside NNCF's; torch.ao's ratios to its own float network."""
    if size.nncf is not None:
        yield from _nncf(size, size.nncf)
    if size.torch is not None:
        yield from _torch(size, size.torch)


def _nncf(size: Size, python: str) -> Iterator[Row]:
    batches = [batch.numpy() for batch in image_batches(4 * size.batches, size.image)]
    traced = qtrace.trace(settle(ResNet18(size.width), Tensor(batches[0])), batches[0], check=False)
    images = len(batches) * size.image[0]
    title = f"{size.net}: calibrate, {images} images, auto, minmax / NNCF min-max"
    prepared = qtrace.prepare(traced, {"observers": {"activation": "minmax"}})
    sides = {"minmax": lambda: qtrace.calibrate(prepared, batches, progress=False)}
    before = run_interleaved(sides, size.slow_repeats).by_side["minmax"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = qtrace.export(qtrace.convert(prepared), folder / "float.onnx", format="onnx_float")
        np.save(folder / "x.npy", np.concatenate(batches))
        nncf_seconds = _run_worker(
            python, "nncf_minmax.py", model, folder / "x.npy", size.image[0], size.slow_repeats
        )["minmax"]
    ours = [*before, *run_interleaved(sides, size.slow_repeats).by_side["minmax"]]
    # Ours before and after it: the machine should not have changed meanwhile.
    median = sorted(sample.wall for sample in ours)[len(ours) // 2]
    yield Row(title, Spread.of([Sample.of(median / other) for other in nncf_seconds]), "x", 1.0)
    yield Row(
        f"{size.net}: NNCF, {images} images, min-max",
        _seconds(nncf_seconds),
        "s",
        note="without bias correction",
    )


def _torch(size: Size, python: str) -> Iterator[Row]:
    seconds_by_side = _run_worker(python, "torch_ao.py", size.image, 4 * size.batches, size.slow_repeats)
    samples = Samples({name: [Sample.of(s) for s in seconds] for name, seconds in seconds_by_side.items()})
    note = "its own float network is the unit"
    for kind in ("minmax", "histogram"):
        title = f"{size.net}: torch.ao FX, prepare and calibrate / forwards, {kind}"
        yield Row(title, samples.ratio(kind, "forward"), "x", note=note)
        yield Row(f"{size.net}: torch.ao FX, {4 * size.batches} batches, {kind}", samples.seconds(kind), "s")
    yield Row(
        f"{size.net}: torch.ao FX, QAT step / float step", samples.ratio("qat step", "step"), "x", note=note
    )
    yield Row(f"{size.net}: torch.ao FX, QAT step", samples.seconds("qat step"), "s")


def _run_worker(python: str, worker: str, *arguments: object) -> dict[str, list[float]]:
    """Runs a worker in its interpreter and returns the figures that it prints."""
    command = [python, str(_WORKERS / worker), *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{worker} failed: {process.stderr.strip().splitlines()[-1:]}")
    return json.loads(process.stdout.splitlines()[-1])


def _seconds(values: list[float]) -> Spread:
    return Spread.of([Sample.of(value) for value in values])
