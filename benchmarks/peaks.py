"""Peak memory and processor time of whole runs, by images and network: ``python -m benchmarks.peaks``.

    python -m benchmarks.peaks network.onnx --shape 3x224x224 --images 16,64,256
    python -m benchmarks.peaks detector.onnx --shape 3x320x320,3x1760x1760 --images 8

Each run is one call of `qtrace.quantize` in a process of its own, from the file and an .npy file of made-up
samples to a verified file, measured in this runtime. Peaks are those of the resident memory beyond what the
process takes with all libraries loaded; pages of mapped files count. ``float`` is a run of one sample of the
float file in onnxruntime. Each stage has a budget: its peak in peaks of such runs, and its processor time in
times of such runs on all samples. The command ends with 1 if a stage exceeds it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from qtrace.display import format_table

__all__ = ["BUDGET", "Case", "main", "measure", "table"]

_HERE = Path(__file__).resolve().parent
_WORKER = _HERE / "workers" / "peaks.py"
_MB = 1e6
BUDGET = {
    "import": (8, 20),
    "prepare": (25, 20),
    "calibrate": (25, 200),
    "export": (15, 10),
    "verify": (20, 25),
    "other": (20, 40),
}
"""Stage -> the most of its peak and of its processor time, in those of float runs."""
_FIGURES = ("peak", "processor time")


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        shape: the shape of a sample.
        images: the number of samples.
        sample_bytes: the bytes of all samples.
        forward: the peak of one sample of the float file in onnxruntime, bytes.
        peaks: stage -> its peak, bytes.
        forward_processor: the processor time of one sample of the float file in onnxruntime, seconds.
        processor: stage -> its processor time, seconds.
        seconds: the wall time of the call.
    """

    shape: tuple[int, ...]
    images: int
    sample_bytes: int
    forward: int
    peaks: Mapping[str, int]
    forward_processor: float
    processor: Mapping[str, float]
    seconds: float

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of a row: shape, images, sizes in MB, the stage of the peak, seconds."""
        stage, peak = max(self.peaks.items(), key=lambda item: item[1])
        sizes = (f"{size / _MB:,.0f}" for size in (self.sample_bytes, self.forward, peak))
        return ("x".join(map(str, self.shape)), str(self.images), *sizes, stage, f"{self.seconds:.0f}")

    def shares(self) -> dict[str, tuple[float, float]]:
        """Returns the peak and the processor time of each stage in float runs: of one sample, and of all."""
        runs = self.images * self.forward_processor
        return {s: (peak / self.forward, self.processor[s] / runs) for s, peak in self.peaks.items()}

    def exceeded(self) -> list[str]:
        """Returns a sentence for each stage that exceeds `BUDGET`."""
        name = f"{self.images} of {'x'.join(map(str, self.shape))}"
        return [
            f"{name}: the {what} of {stage} is {share:.0f} float runs, and its budget is {limit}."
            for stage, shares in self.shares().items()
            for what, share, limit in zip(_FIGURES, shares, BUDGET.get(stage, BUDGET["other"]), strict=True)
            if share > limit
        ]


def measure(model: Path, shape: tuple[int, ...], images: int, folder: Path) -> Case:
    """Measures a run.

    Args:
        model: an ONNX file of one input.
        shape: the shape of a sample.
        images: the number of samples.
        folder: where the samples and the int8 file are written.
    """
    samples = folder / "samples.npy"
    _write_samples(samples, (images, *shape))
    forward, run = (_run(model, samples, kind, folder) for kind in ("forward", "default"))
    size = samples.stat().st_size
    samples.unlink()
    peak, processor = (max(forward[name].values()) for name in ("peaks", "processor"))
    return Case(shape, images, size, peak, run["peaks"], processor, run["processor"], run["seconds"])


def _write_samples(path: Path, shape: tuple[int, ...]) -> None:
    """Writes normal numbers, one sample at a time."""
    random = np.random.default_rng(0)
    array = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    for sample in array:
        sample[...] = random.standard_normal(shape[1:], np.float32)
    array.flush()


def _run(model: Path, samples: Path, kind: str, folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(_HERE.parent)}
    command = [sys.executable, str(_WORKER), str(model.resolve()), str(samples), kind, str(folder / "o.onnx")]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        raise RuntimeError(f"{kind}: {process.stderr.strip()}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def table(cases: Sequence[Case]) -> str:
    """Returns one line for each case."""
    head = ("sample", "images", "samples, MB", "float, MB", "peak, MB", "in", "seconds")
    return format_table(head, [case.cells() for case in cases], None)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peaks", description="Measures the peak memory of whole runs."
    )
    parser.add_argument("model", type=Path, help="an ONNX file of one input")
    parser.add_argument("--shape", required=True, help="shapes of a sample, such as 3x224x224,3x448x448")
    parser.add_argument("--images", required=True, help="numbers of samples, such as 16,64")
    options = parser.parse_args(arguments)
    shapes = [tuple(int(n) for n in text.split("x")) for text in options.shape.split(",")]
    counts = [int(n) for n in options.images.split(",")]
    cases = []
    with tempfile.TemporaryDirectory(prefix="qtrace-peaks-") as folder:
        for shape in shapes:
            for count in counts:
                cases.append(measure(options.model, shape, count, Path(folder)))
                print(" | ".join(cases[-1].cells()), file=sys.stderr, flush=True)
    print(f"{options.model.name}, load {machine.load()}\n{table(cases)}")
    for case in cases:
        peaks = ", ".join(f"{stage} {peak / _MB:,.0f}" for stage, peak in case.peaks.items())
        print(f"{case.images} of {'x'.join(map(str, case.shape))}: {peaks} MB")
        shares = (f"{stage} {peak:.1f} and {time:.1f}" for stage, (peak, time) in case.shares().items())
        print(f"  peak and processor time in float runs: {', '.join(shares)}")
    exceeded = [sentence for case in cases for sentence in case.exceeded()]
    print(*exceeded, sep="\n", end="", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
