"""Times ncnn nets, ``.param`` and ``.bin``, on CPU with the options that ncnn has by default.

ncnn checks little of a net and of the sizes of its inputs, so that it runs, and reads the clock, in a child.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qtrace.benchmarking.runners import Load, RunnerSettings, random_values
from qtrace.errors import ExportError
from qtrace.runtimes.files import RuntimeChild
from qtrace.runtimes.ncnn_net import read_blobs, read_index_inputs

__all__ = ["LOAD"]


class NcnnRunner:
    """A net with inputs; a run computes the samples of a batch one by one."""

    in_thread = False

    def __init__(self, path: Path, settings: RunnerSettings) -> None:
        weights = path.with_suffix(".bin")
        if not weights.is_file():
            raise ExportError(f"{weights} does not exist: it belongs next to {path.name}.")
        inputs, outputs, _ = read_blobs(path)
        indices = read_index_inputs(path)
        shapes = [_shape(name, settings) for name in inputs]
        child = RuntimeChild("ncnn", "ncnn", path, settings.host)
        self._file, _ = child.open(
            param=child.place(path),
            bin=child.place(weights),
            optimize=True,
            threads=settings.threads,
            light=True,
            inputs=inputs,
            outputs=outputs,
            indices=indices,
        )
        dtypes = (np.int32 if name in indices else np.float32 for name in inputs)
        pairs = zip(shapes, dtypes, strict=True)
        self._file.run([random_values(shape, np.dtype(dtype)) for shape, dtype in pairs])
        self.side = child.side if settings.host is not None else {}
        self.samples = next((shape[0] for shape in shapes if shape), 1)

    def run(self) -> float:
        """Runs the net once and returns the seconds that it took."""
        return self._file.time()

    def memory(self) -> int:
        """Returns the bytes that the net added to the child process at most."""
        return self._file.memory()


def _shape(name: str, settings: RunnerSettings) -> tuple[int, ...]:
    """Returns the shape of an input, which a net does not store."""
    if name not in settings.shapes:
        raise ExportError(
            f"an ncnn net lacks shapes: give the shape of input {name!r}, as in --shape {name}=1x3x224x224."
        )
    return settings.shapes[name]


LOAD = Load("ncnn", "ncnn", "ncnn", (".param",), NcnnRunner)
