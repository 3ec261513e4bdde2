"""Runs an ONNX file in onnxruntime, with all its integer tensors as outputs.

It runs in this process, unlike LiteRT and ncnn. onnxruntime raises an exception for what it cannot load or
run: none of 150 files with bytes changed at random ended the process. A child would cost 0.4 s each time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qtrace.errors import ExportError
from qtrace.onnxfile.kernels import find_kernels
from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.process.memory import return_free_memory
from qtrace.runtimes.host import RuntimeHost
from qtrace.verification.runtimes._onnx import as_declared, check_samples, with_integer_outputs
from qtrace.verification.runtimes.base import Runtime, RuntimeRun

__all__ = ["RUNTIME"]


class OnnxSession:
    """Runs an ONNX file on CPU.

    With optimizations, the outputs come from the file as it is, and the integers from a copy in which they
    are outputs, across which onnxruntime does not fuse. In this process it takes one thread, so that it runs
    beside the graph.
    """

    def __init__(self, path: Path, optimize: bool, host: RuntimeHost | None = None) -> None:
        model = with_integer_outputs(path)
        self.output_names, self.tensor_names = model.outputs, model.tensors
        self.integer_names: Sequence[str] = model.integers
        self.place_names, self.place_kinds = model.places, model.kinds
        self.graph_hash, self.fixed_samples = model.graph_hash, model.fixed_samples
        self.float16 = model.float16
        self.concurrent = host is None
        threads = 1 if self.concurrent else None
        settings = SessionSettings(optimize, threads, tensors=model.folder, host=host)
        self.session = open_session(model.data, settings, str(path))
        deployed: bytes | Path = model.deployed or path
        del model  # the session has copies of its weights
        return_free_memory()
        self.deployed = open_session(deployed, settings, str(path)) if optimize else None
        self.side = self.session.side
        self.input_names = [i.name for i in self.session.inputs]
        self.input_types = [i.type[len("tensor(") : -1] for i in self.session.inputs]

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        """Runs the model; see `Session`."""
        if len(inputs) != len(self.input_names):
            raise ExportError(f"the model takes {len(self.input_names)} inputs, not {len(inputs)}.")
        check_samples(self.fixed_samples, self.input_names, inputs)
        names = [*self.output_names, *self.tensor_names, *self.place_names]
        feeds = dict(zip(self.input_names, as_declared(inputs, self.input_types), strict=True))
        values = self.session.run(names, feeds)
        count, end = len(self.output_names), len(self.output_names) + len(self.tensor_names)
        outputs, places = values[:count], values[end:]
        if self.deployed is not None:
            deployed = self.deployed.run([*self.output_names, *self.place_names], feeds)
            outputs, places = deployed[:count], deployed[count:]
        integers = dict(zip(self.integer_names, values[count:end], strict=True))
        return RuntimeRun(outputs, integers, places)


def runtime(host: RuntimeHost | None = None) -> Runtime:
    """Returns onnxruntime in this process, or in that of a host."""
    return Runtime(
        "onnxruntime",
        "onnxruntime",
        "onnx",
        (".onnx",),
        functools.partial(OnnxSession, host=host),
        functools.partial(find_kernels, host=host),
        hosted=runtime,
        host=host,
    )


RUNTIME = runtime()
