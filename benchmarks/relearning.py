"""A text detector fine-tuned without labels: ``python -m benchmarks.relearning FILE``.

FILE is the ONNX file of the detector, with the input x. It is quantized to 8 bits in two placements, and to
weights of 4 bits. The noise at its output is measured on pages that nothing was chosen on, in other fonts.
It needs torch, unless ``--engine megengine`` is given.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megengine import Tensor

import qtrace
from benchmarks import machine
from examples.ocr import pages
from qtrace.comparing.sums import ErrorSums
from qtrace.extras.finetune import FinetuneSettings
from qtrace.graph.types import TracedModule

__all__ = ["Outcome", "main", "measure"]

_CONFIGS: dict[str, dict[str, Any]] = {
    "W8A8, balanced": {},
    "W8A8, everything": {"placement": "everything"},
    "W4A8": {"weight": {"bits": 4}},
}
_GAINS = {"W8A8, balanced": 2.0, "W8A8, everything": 2.0, "W4A8": 4.0}
_RATE = 0.003
_MINUTES = 10.0


@dataclass(frozen=True)
class Outcome:
    """A fine-tuning.

    Attributes:
        name: bits of weights and activations, and the placement.
        before: SQNR of the output after calibration, dB.
        after: the same after fine-tuning.
        minutes: wall time of the fine-tuning, evaluations included.
        steps: steps of Adam.
    """

    name: str
    before: float
    after: float
    minutes: float
    steps: int

    def describe(self) -> str:
        """Returns a line with the figures beside their targets."""
        gain, least = self.after - self.before, _GAINS[self.name]
        met = gain >= least and self.minutes <= _MINUTES
        return (
            f"{self.name}: {self.before:.2f} -> {self.after:.2f} dB ({gain:+.2f}, target {least:+.0f}), "
            f"{self.steps} steps in {self.minutes:.1f} minutes (target {_MINUTES:g}): "
            + ("met" if met else "MISSED")
        )


def measure(name: str, network: TracedModule, settings: FinetuneSettings, counts: tuple[int, int]) -> Outcome:
    """Calibrates and fine-tunes the detector.

    Args:
        name: bits of weights and activations.
        network: the float network.
        settings: those of the fine-tuning.
        counts: the number of pages to learn from, and to judge on.
    """
    learned = pages.normalize(pages.load("calibration", counts[0]))
    judged = pages.normalize(pages.load("test", counts[1]))
    batches = [learned[i : i + 4] for i in range(0, len(learned), 4)]
    prepared = qtrace.prepare(network, _CONFIGS[name], samples=batches[:2])
    qtrace.calibrate(prepared, batches, progress=False)
    before = _sqnr(prepared, network, judged)
    start = time.perf_counter()
    report = qtrace.finetune(prepared, batches, settings, teacher=network, progress=False)
    minutes = (time.perf_counter() - start) / 60
    print(f"engine {report.engine}: {report.table().splitlines()[0]}", file=sys.stderr)
    return Outcome(name, before, _sqnr(prepared, network, judged), minutes, settings.steps)


def _sqnr(prepared: TracedModule, network: TracedModule, images: np.ndarray) -> float:
    """Returns the signal-to-noise ratio at the output, in dB."""
    sums = ErrorSums()
    for image in images:
        exact, rounded = (model(Tensor(image[None])).numpy() for model in (network, prepared))
        sums.add(exact, rounded)
    return float(sums.sqnr_db)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relearning", description=__doc__)
    parser.add_argument("file", type=Path, help="the ONNX file of a text detector, with the input x")
    parser.add_argument("--only", choices=_CONFIGS, help="one of them")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="pages in a step")
    parser.add_argument("--lr", type=float, default=_RATE, help="in quantization steps")
    parser.add_argument("--pages", type=int, nargs=2, default=(64, 24), help="to learn from, and to judge on")
    parser.add_argument("--engine", choices=("torch", "megengine"), default="torch")
    options = parser.parse_args(arguments)
    network = qtrace.from_onnx(options.file, {"x": (1, 3, pages.SIZE, pages.SIZE)}, batch="x:0")
    settings = FinetuneSettings(
        steps=options.steps, batch_size=options.batch, lr=options.lr, engine=options.engine, evaluate_every=25
    )
    for name in [options.only] if options.only else _CONFIGS:
        print(measure(name, network, settings, tuple(options.pages)).describe(), flush=True)
    print(", ".join(f"{key}: {value}" for key, value in machine.facts().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
