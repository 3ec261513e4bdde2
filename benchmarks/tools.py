"""Wall times of everything around calibration and training, for information."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megengine.module as M
from megengine import Tensor
from megengine.module import Module

import qtrace
from benchmarks.nets import MobileNetV2, ResNet18, ResNet50, image_batches, settle
from benchmarks.rows import Row, Size
from benchmarks.timing import Samples, run_interleaved
from tests.zoo.darknet import CSPDarknet

__all__ = ["run"]


def run(size: Size) -> Iterator[Row]:
    """Times trace, prepare, explain, convert, export, verify, save and load of four networks."""
    batches = image_batches(1, size.image)
    nets = {
        size.net: ResNet18(size.width),
        "ResNet-50": ResNet50(size.width),
        "MobileNetV2": MobileNetV2(size.mobile_width),
        "CSPDarknet": CSPDarknet(M.SiLU, size.width),
    }
    for name, net in nets.items():
        samples = _measured(
            settle(net, batches[0]), batches, 3 if size.slow_repeats > 3 else size.slow_repeats
        )
        for side in samples.by_side:
            yield Row(f"{name}: {side}", samples.seconds(side), "s")


def _measured(net: Module, batches: list[Tensor], rounds: int) -> Samples:
    traced = qtrace.trace(net, batches[0])
    prepared = qtrace.prepare(traced, {"observers": {"activation": "minmax"}})
    converted = qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))
    with tempfile.TemporaryDirectory() as folder:
        model, saved = Path(folder) / "model.onnx", Path(folder) / "model.tm"
        sides: dict[str, Callable[[], Any]] = {
            "forward": lambda: net(batches[0]),
            "trace with its comparison": lambda: qtrace.trace(net, batches[0]),
            "prepare": lambda: qtrace.prepare(traced),
            "explain": lambda: str(qtrace.explain(prepared)),
            "convert": lambda: qtrace.convert(prepared),
            "export": lambda: qtrace.export(converted, model),
            "verify, one batch": lambda: qtrace.verify(model, converted, batches),
            "save": lambda: qtrace.save(converted, saved),
            "load": lambda: qtrace.load(saved),
        }
        # The first round must run in this order: verify and load need the files.
        return run_interleaved(sides, rounds)
