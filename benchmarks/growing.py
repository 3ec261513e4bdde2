"""Growth of the work on graphs: every step from a trace to a file, on a chain and on one twice as long."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import qtrace
from benchmarks.nets import chain
from benchmarks.rows import Row, Size
from benchmarks.timing import Sample, Spread, run_interleaved
from qtrace.graph.lint import lint

__all__ = ["run"]

_GROWTH = 2.2
# Of the number of layers that preparing begins with: 100 to 3,200.
_FACTORS = (0.25, 1, 4, 8)
_IMAGE = np.ones((1, 4, 8, 8), np.float32)


def run(size: Size) -> Iterator[Row]:
    """Each step on chains that double; then what importing qtrace adds to importing MegEngine."""
    layers = [int(size.chain * factor) for factor in _FACTORS]
    with tempfile.TemporaryDirectory() as folder:
        chains = {n: _Chain(n, Path(folder)) for n in layers}
        for name in _Chain.STEPS:
            sides: dict[str, Callable[[], Any]] = {str(n): getattr(c, name) for n, c in chains.items()}
            samples = run_interleaved(sides, max(size.slow_repeats - 2, 1), warm_up=0)
            for n in layers:
                yield Row(f"{name}, chain of {n} layers", samples.seconds(str(n)), "s")
            growth = samples.ratio(str(layers[-1]), str(layers[-2]))
            yield Row(f"{name}, chain of {layers[-1]} / {layers[-2]} layers", growth, "x", _GROWTH)
    yield Row("import qtrace and its public names, beyond MegEngine's import", _import_time(size), "s", 0.3)


class _Chain:
    """The steps on one chain of conv, BatchNorm, ReLU; each leaves what the next ones need."""

    STEPS = ("prepare", "explain", "lint", "calibrate", "convert", "export", "save", "load")

    def __init__(self, layers: int, folder: Path) -> None:
        self.traced = qtrace.trace(chain(max(1, layers // 3)), _IMAGE, check=False)
        self.folder = folder / str(layers)
        self.folder.mkdir()
        self.prepared: Any = None
        self.converted: Any = None

    def prepare(self) -> None:
        self.prepared = qtrace.prepare(self.traced)

    def explain(self) -> None:
        qtrace.explain(self.prepared).table()

    def lint(self) -> None:
        assert not lint(self.prepared)

    def calibrate(self) -> None:
        qtrace.calibrate(self.prepared, [_IMAGE], progress=False, engine="megengine")

    def convert(self) -> None:
        self.converted = qtrace.convert(self.prepared)

    def export(self) -> None:
        qtrace.export(self.converted, self.folder / "chain.onnx")

    def save(self) -> None:
        qtrace.save(self.converted, self.folder / "chain.mge")

    def load(self) -> None:
        qtrace.load(self.folder / "chain.mge")


_IMPORT = """
import time
import megengine, megengine.functional, megengine.module, megengine.traced_module, megengine.quantization
import numpy, scipy, megengine.autodiff
start = time.perf_counter()
import qtrace
{names}
print(time.perf_counter() - start)
"""


def _import_time(size: Size) -> Spread:
    """Fresh processes, MegEngine and numpy imported before; every public name is touched."""
    text = _IMPORT.format(names="; ".join(f"qtrace.{name}" for name in qtrace.__all__))
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        # Compiled before, as wherever it is installed, whatever this environment says.
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for number in range(size.slow_repeats + 1):
            command = [sys.executable, "-W", "ignore", "-c", text]
            process = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            if number:
                samples.append(Sample.of(float(process.stdout.split()[-1])))
    return Spread.of(samples)
