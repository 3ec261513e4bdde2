"""Runs an ncnn net, ``.param`` and ``.bin``, in ncnn's Python package, with the integers of all roundings.

ncnn checks little of a net and of the sizes of its inputs. It runs in a child: if it reads what is not there,
the caller lives.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from qtrace.errors import ExportError
from qtrace.runtimes.child import RuntimeChild
from qtrace.runtimes.host import RuntimeHost
from qtrace.targets.ncnn.runner import read_blobs, read_index_inputs
from qtrace.targets.ncnn.writer import shapes_of_one_sample
from qtrace.verification.runtimes.base import Runtime, RuntimeRun


class NcnnSession:
    """Runs a net on CPU, sample by sample."""

    shapes_of_one_sample = staticmethod(shapes_of_one_sample)

    def __init__(self, path: Path, optimize: bool, host: RuntimeHost | None = None) -> None:
        weights = path.with_suffix(".bin")
        for file in (path, weights):
            if not file.is_file():
                raise ExportError(f"{file} does not exist: export the module first.")
        self.input_names, self.output_names, self.blobs = read_blobs(path)
        self.integer_names = [name.removesuffix("_int") for name in self.blobs]
        child = RuntimeChild("ncnn", "ncnn", path, host)
        self._file, _ = child.open(
            param=child.place(path),
            bin=child.place(weights),
            optimize=optimize,
            yields=True,
            inputs=self.input_names,
            indices=read_index_inputs(path),
            outputs=[*self.output_names, *self.blobs],
        )
        self.side = child.side if host is not None else {}

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        """Runs the model; see `Session`."""
        self._check(inputs)
        values = self._file.run(inputs)
        count = len(self.output_names)
        integers = [value.astype(np.int32) for value in values[count:]]
        return RuntimeRun(values[:count], dict(zip(self.integer_names, integers, strict=True)))

    def run_outputs(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Runs the model and returns only its outputs."""
        self._check(inputs)
        return self._file.run(inputs, outputs=self.output_names)

    def _check(self, inputs: list[np.ndarray]) -> None:
        if len(inputs) != len(self.input_names):
            raise ExportError(f"the model takes {len(self.input_names)} inputs, not {len(inputs)}.")


def runtime(host: RuntimeHost | None = None) -> Runtime:
    """Returns ncnn in this interpreter, or in a host's."""
    opened = functools.partial(NcnnSession, host=host)
    return Runtime(
        "ncnn", "ncnn", "ncnn", (".param",), opened, companions=(".bin",), hosted=runtime, host=host
    )


RUNTIME = runtime()
