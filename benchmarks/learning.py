"""A step of `qtrace.finetune` by torch and by MegEngine: ``python -m benchmarks.learning [--detector FILE]``.

Both engines take turns in one process, on the same prepared graph and batch. A step is all from the drawn
batch to the moved parameters. MegEngine's steps run under ``jit.trace``, as those of a run of 20 steps or
more do. It needs torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import qtrace
from benchmarks import machine
from benchmarks.nets import ResNet18, image_batches, settle
from benchmarks.rows import Row, Size, render
from benchmarks.timing import run_interleaved
from qtrace.extras.finetune import FinetuneSettings
from qtrace.extras.finetune.finetune import TuningRun
from qtrace.graph.types import TracedModule

__all__ = ["main", "run"]

_TARGET = 0.25
_ENGINES = ("megengine", "torch")
_SIDE = 320  # pixels of the detector's images
_DETECTOR_BATCH = 2


def run(size: Size, detector: Path | None = None) -> Iterator[Row]:
    """Times the steps of both engines, on ResNet-18 and on a text detector in ONNX."""
    batch = image_batches(1, size.image)[0]
    traced = qtrace.trace(settle(ResNet18(size.width), batch), batch, check=False)
    yield from _rows(size.net, traced, batch.numpy(), size.slow_repeats)
    if detector is not None:
        images = np.random.default_rng(0).normal(size=(_DETECTOR_BATCH, 3, _SIDE, _SIDE)).astype(np.float32)
        name = f"text detector {'x'.join(map(str, images.shape))}"
        network = qtrace.from_onnx(detector, {"x": (1, *images.shape[1:])}, batch="x:0")
        yield from _rows(name, network, images, size.slow_repeats)


def _rows(name: str, traced: TracedModule, images: np.ndarray, repeats: int) -> Iterator[Row]:
    prepared = qtrace.prepare(traced, {"observers": {"activation": "minmax"}, "fakequant": "lsq"})
    qtrace.calibrate(prepared, [images], progress=False)
    sides: dict[str, Callable[[], object]] = {}

    def measure(run: Any, *_: Any) -> None:
        """Takes the place of a run's steps."""
        trainer = run.trainer
        trainer.watch.start()
        sides[trainer.twins.engine.name] = lambda: trainer.move(0, *trainer.compute(0))
        if len(sides) < len(_ENGINES):
            _finetune(prepared, images, _ENGINES[1], measure)
        else:
            samples.append(run_interleaved(sides, repeats, warm_up=2))

    samples: list[Any] = []
    _finetune(prepared, images, _ENGINES[0], measure)
    ratio = samples[0].ratio("torch", "megengine")
    yield Row(f"{name}: finetune step, torch / MegEngine", ratio, "x", _TARGET)
    for engine in _ENGINES:
        yield Row(f"{name}: finetune step, {engine}", samples[0].seconds(engine), "s")


class _Measured(Exception):
    """Ends a run whose steps were measured."""


def _finetune(prepared: TracedModule, images: np.ndarray, engine: str, measure: Callable[..., None]) -> None:
    """Begins a fine-tuning and calls ``measure`` in place of its steps; the module is restored afterwards."""
    learn = TuningRun.learn

    def measured(run: Any, *arguments: Any) -> None:
        TuningRun.learn = learn  # type: ignore[method-assign]
        measure(run, *arguments)
        raise _Measured

    TuningRun.learn = measured  # type: ignore[method-assign]
    settings = FinetuneSettings(steps=1000, batch_size=len(images), jit=True, engine=engine, freeze_below=0.0)
    try:
        qtrace.finetune(prepared, [images], settings, evaluation=[images], progress=False)
    except _Measured:
        pass
    finally:
        TuningRun.learn = learn  # type: ignore[method-assign]


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--detector", type=Path, help="the ONNX file of a text detector, with the input x")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: the figures mean nothing")
    parser.add_argument("--rounds", type=int, help="rounds of both engines")
    options = parser.parse_args(arguments)
    size = Size.quick() if options.quick else Size()
    size = dataclasses.replace(size, slow_repeats=options.rounds or size.slow_repeats)
    facts, rows = machine.facts(), []
    for row in run(size, options.detector):
        print(f"{row.name}: {row.value.median:.3g} {row.unit}", file=sys.stderr, flush=True)
        rows.append(row)
    print(render({"learning": rows}))
    print("\n" + ", ".join(f"{key}: {value}" for key, value in facts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
