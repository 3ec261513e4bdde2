"""Files of a network in the runtime of their target, for their outputs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.data.batches import as_arguments
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.local_session import OrtSession, SessionSettings, dtype_of
from qtrace.onnxfile.sessions import open_session
from qtrace.quantizing.labelling_runs import LabellingRuns
from qtrace.quantizing.openvino_runs import OpenvinoRuns
from qtrace.runtimes.host import RuntimeHost
from qtrace.verification import runtimes
from qtrace.verification.runtimes import runs_optimized

__all__ = ["FileRuns", "input_values", "open_runs", "run_batch"]

FileRuns = OrtSession | OpenvinoRuns | LabellingRuns
"""A file that runs, with its inputs."""

_ONE_THREAD = SessionSettings(threads=1)


def open_runs(
    path: Path, converted: TracedModule | None, backend: str, host: RuntimeHost | None = None
) -> FileRuns:
    """Opens a file on one thread: an ONNX file in the runtime of its backend, else in onnxruntime.

    Files whose numbers onnxruntime's optimizations would change run without them.

    Args:
        path: the file.
        converted: the graph that it was exported from; None for an ONNX file.
        backend: the name of the backend that it is for.
        host: the interpreter or machine that has the runtime; None for this one.

    Raises:
        ExportError: when the runtime is not installed, or cannot load the file.
    """
    if path.suffix.lower() != ".onnx":
        assert converted is not None
        return LabellingRuns(path, converted, host)
    runtime = runtimes.get(path, None, host, backend)
    if runtime.name == "openvino":
        return OpenvinoRuns(path, host)
    return open_session(path, replace(_ONE_THREAD, optimize=runs_optimized(runtime, backend), host=host))


def input_values(traced: TracedModule, batch: Any, number: int) -> list[np.ndarray]:
    """Returns the values of a file's inputs for a batch, in the order of the graph's.

    Args:
        traced: the network.
        batch: a batch, as for `qtrace.calibrate`.
        number: its number, for messages.
    """
    args, kwargs = as_arguments(batch, traced, number)
    return [value.numpy() for value in Interpreter(traced).bind(args, kwargs)[1][1:]]


def run_batch(session: FileRuns, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns all outputs of a file for the values of its inputs, each in the type that the file takes."""
    feeds = {
        info.name: value.astype(dtype_of(info.type) or value.dtype, copy=False)
        for info, value in zip(session.inputs, values, strict=True)
    }
    return session.run(None, feeds)
