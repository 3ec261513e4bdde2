"""Files of a network in the runtime of their target, for their outputs only, and its float file."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.config import QConfig
from qtrace.config.rule import Rule
from qtrace.data.batches import as_arguments
from qtrace.export import export
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.local_session import OrtSession, SessionSettings, dtype_of
from qtrace.onnxfile.sessions import open_session
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes.convert import convert
from qtrace.preparation.prepare import prepare
from qtrace.runtimes.host import RuntimeHost
from qtrace.verification import runtimes
from qtrace.verification.other_sizes import by_sample
from qtrace.verification.runtimes import runs_optimized
from qtrace.verification.runtimes.base import Session, run_outputs


class FloatFile:
    """A network as a file with every op in float, in a folder of its own that is deleted at the end.

    Args:
        traced: the float network.
        config: the config, whose backend the file is for.
        suffix: the suffix of the quantized file.

    Attributes:
        folder: where the file is written.
    """

    def __init__(self, traced: TracedModule, config: QConfig, suffix: str) -> None:
        self.traced, self.config, self.suffix = traced, config, suffix
        self._temporary = tempfile.TemporaryDirectory(prefix="qtrace-float-")
        self.folder = Path(self._temporary.name)

    def __enter__(self) -> FloatFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    @functools.cached_property
    def prepared(self) -> TracedModule:
        """The graph of the file, before `convert`."""
        rule = Rule.model_validate({"match": {"name": "*"}, "quantize": False})
        plain = self.config.without_placement()
        rules = (*plain.rules, rule.with_origin("the measured speed"))
        changes = {"rules": rules, "ptq": None, "placement": "everything", "float": None}
        return prepare(self.traced, plain.model_copy(update=changes))

    @functools.cached_property
    def converted(self) -> TracedModule:
        """The graph of the file."""
        return convert(self.prepared)

    @functools.cached_property
    def path(self) -> Path:
        """The file.

        Raises:
            ExportError: when the graph lacks such a form.
        """
        return export(self.converted, self.folder / f"float{self.suffix}")


_ONE_THREAD = SessionSettings(threads=1)

FileRuns = OrtSession | Session
"""A file that runs; in another runtime than onnxruntime the session that `verify` has, too."""


def open_runs(
    path: Path, converted: TracedModule | None, backend: str, host: RuntimeHost | None = None
) -> FileRuns:
    """Opens a file: an ONNX file in the runtime of its backend, else in onnxruntime, on one thread there.

    Files whose numbers onnxruntime's optimizations would change run without them.

    Args:
        path: the file.
        converted: the graph that it was exported from; None for an ONNX file.
        backend: the name of the backend that it is for.
        host: the interpreter or machine that has the runtime; None for this one.

    Raises:
        ExportError: when the runtime is not installed, or cannot load the file.
    """
    runtime = runtimes.get(path, None, host, backend)
    if runtime.name == "onnxruntime":
        return open_session(path, replace(_ONE_THREAD, optimize=runs_optimized(runtime, backend), host=host))
    session = runtime.open(path, True)
    return session if converted is None else by_sample(session, QuantizedModel(converted))


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
    if not isinstance(session, OrtSession):
        return run_outputs(session, list(values))
    feeds = {
        info.name: value.astype(dtype_of(info.type) or value.dtype, copy=False)
        for info, value in zip(session.inputs, values, strict=True)
    }
    return session.run(None, feeds)
