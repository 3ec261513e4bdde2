"""Files of a network in the runtime of their target, for their outputs only, and its float file."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from qtrace.config import QConfig
from qtrace.config.rule import Rule
from qtrace.data.batches import as_arguments
from qtrace.export import export
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.signature import list_inputs
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.local_session import OrtSession, SessionSettings, SessionValue, dtype_of
from qtrace.onnxfile.openvino import OpenvinoFile
from qtrace.onnxfile.reading import read_model
from qtrace.onnxfile.sessions import open_session
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes.convert import convert
from qtrace.preparation.prepare import prepare
from qtrace.runtimes.host import RuntimeHost
from qtrace.verification import runtimes
from qtrace.verification.other_sizes import by_sample
from qtrace.verification.runtimes import runs_optimized
from qtrace.verification.runtimes.base import run_outputs

__all__ = ["FileRuns", "FloatFile", "input_values", "open_runs", "run_batch"]


class FloatFile:
    """A network as a file with every op in float, in a folder of its own that is deleted at the end.

    Args:
        traced: the float network.
        config: the config, whose backend the file is for.
        suffix: the suffix of the quantized file.
    """

    def __init__(self, traced: TracedModule, config: QConfig, suffix: str) -> None:
        self.traced, self.config, self.suffix = traced, config, suffix
        self._folder = tempfile.TemporaryDirectory(prefix="qtrace-float-")

    def __enter__(self) -> FloatFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

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
        path = Path(self._folder.name) / f"float{self.suffix}"
        export(self.converted, path)
        return path


_ONE_THREAD = SessionSettings(threads=1)
# As the file is timed. The default precision on some CPUs is bfloat16, which is no noise of the integers.
_SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1"}


class CompiledRuns:
    """A TFLite file or ncnn net in its runtime, with the inputs and the `run` of an `OrtSession`.

    Args:
        path: the file.
        converted: the graph that it was exported from.
        host: the interpreter or machine that has the runtime; None for this one.

    Attributes:
        inputs: the inputs of the graph; their first size is None where the file takes any number of samples.

    Raises:
        ExportError: when the runtime cannot load the file.
    """

    def __init__(self, path: Path, converted: TracedModule, host: RuntimeHost | None = None) -> None:
        session = runtimes.get(path, None, host).open(path, True)
        self._session = by_sample(session, QuantizedModel(converted))
        facts = getattr(session, "facts", None)
        is_open = self._session is session and (facts is None or bool(facts["free_batch"]))
        self.inputs = [
            SessionValue(name, "", [None if is_open else shape[0], *shape[1:]] if shape else [])
            for name, shape in list_inputs(converted)
        ]

    def run(self, names: None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Runs the file once and returns all of its outputs.

        Args:
            names: None, for all outputs.
            feeds: input -> its value.

        Raises:
            ExportError: when the runtime refuses the inputs.
        """
        return run_outputs(self._session, [feeds[value.name] for value in self.inputs])


class OpenvinoRuns:
    """An ONNX file in OpenVINO on one thread, with the inputs and the `run` of an `OrtSession`.

    Args:
        path: the file.
        host: the interpreter or machine that has OpenVINO; None for this one.

    Attributes:
        inputs: the inputs that the file declares, without their types.

    Raises:
        ExportError: when OpenVINO cannot load the file.
    """

    def __init__(self, path: Path, host: RuntimeHost | None = None) -> None:
        graph = read_model(path).graph
        stored = {tensor.name for tensor in graph.initializer}
        self.inputs = [
            SessionValue(value.name, "", [d.dim_value or None for d in value.type.tensor_type.shape.dim])
            for value in graph.input
            if value.name not in stored
        ]
        self._file = OpenvinoFile(path, _SETTINGS, path, host)

    def run(self, names: None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Runs the file once and returns all of its outputs.

        Args:
            names: None, for all outputs.
            feeds: input -> its value; a compiled model lacks a port for an input that nothing reads.

        Raises:
            ExportError: when OpenVINO refuses the inputs.
        """
        return self._file.run([_value_of(port["names"], feeds, port["dtype"]) for port in self._file.inputs])


def _value_of(names: Sequence[str], feeds: Mapping[str, np.ndarray], dtype: str) -> np.ndarray:
    """Returns the value of the port with the ``names``, in its type."""
    return next(feeds[name] for name in names if name in feeds).astype(np.dtype(dtype), copy=False)


FileRuns = OrtSession | OpenvinoRuns | CompiledRuns
"""A file that runs, with its inputs."""


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
        return CompiledRuns(path, converted, host)
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
