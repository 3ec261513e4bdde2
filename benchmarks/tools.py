"""Wall times of everything around calibration and training, for information."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import qtrace
from benchmarks.nets import ResNet18, image_batches, settle
from benchmarks.rows import Row, Size
from benchmarks.timing import take_turns

__all__ = ["run"]


def run(size: Size) -> Iterator[Row]:
    """Trace, prepare, explain, convert, export, verify, save, load of a ResNet-18."""
    batches = image_batches(1, size.image)
    net = settle(ResNet18(size.width), batches[0])
    traced = qtrace.trace(net, batches[0])
    prepared = qtrace.prepare(traced, {"observers": {"activation": "minmax"}})
    converted = qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))
    with tempfile.TemporaryDirectory() as folder:
        model, saved = Path(folder) / "model.onnx", Path(folder) / "model.tm"
        sides = {
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
        samples = take_turns(sides, size.few)
    for name in sides:
        yield Row(f"{size.net}: {name}", samples.seconds(name), "s")
