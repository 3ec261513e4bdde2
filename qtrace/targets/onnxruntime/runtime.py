"""Runs an ONNX file in onnxruntime, with all its integer tensors as outputs.

It runs in this process, unlike LiteRT and ncnn. An exception says what onnxruntime cannot load or run: none
of 150 files with bytes changed at random ended the process. A child would cost 0.4 s each time.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.onnxfile.kernels import find_kernels
from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.process import return_free_memory
from qtrace.runtimes.host import RuntimeHost
from qtrace.verification.runtimes.base import Runtime
from qtrace.verification.runtimes.onnx_model import ExposedSession, as_declared, with_integer_outputs


class OnnxSession(ExposedSession):
    """Runs an ONNX file on CPU; in this process in one thread, so that it runs next to the graph."""

    def __init__(self, path: Path, optimize: bool, host: RuntimeHost | None = None) -> None:
        model = with_integer_outputs(path)
        super().__init__(model)
        self.concurrent = host is None
        threads = 1 if self.concurrent else None
        settings = SessionSettings(optimize, threads, tensors=model.folder, host=host, shared=True)
        self.compiled = open_session(model.data, settings, str(path))
        deployed: bytes | Path = model.deployed or path
        del model  # the session has copies of its weights
        return_free_memory()
        self.deployed = open_session(deployed, settings, str(path)) if optimize else None
        self.side = self.compiled.side
        self.input_names = [i.name for i in self.compiled.inputs]
        self._types = [i.type[len("tensor(") : -1] for i in self.compiled.inputs]

    def infer(self, file: Any, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Returns all outputs of a session."""
        feeds = dict(zip(self.input_names, as_declared(inputs, self._types), strict=True))
        values: list[np.ndarray] = file.run(None, feeds)
        return values


def runtime(host: RuntimeHost | None = None) -> Runtime:
    """Returns onnxruntime in this process, or in a host's."""
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
