"""Sessions of onnxruntime on CPU: the one place that opens them, with its settings and its errors."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError, install
from qtrace.onnxfile.external_data import tensor_files
from qtrace.runtimes import worker
from qtrace.runtimes.child import RefusalError
from qtrace.runtimes.files import RuntimeChild, RuntimeFile
from qtrace.runtimes.host import RuntimeHost

__all__ = [
    "OrtSession",
    "SessionError",
    "SessionSettings",
    "SessionValue",
    "onnxruntime_errors",
    "open_session",
]


class SessionError(ExportError):
    """onnxruntime refuses a model or an input.

    Attributes:
        reason: what onnxruntime says, in one line and without a full stop.
    """

    def __init__(self, subject: str, error: Exception | str) -> None:
        self.reason = " ".join(str(error).split())[:300].rstrip(".")
        super().__init__(f"onnxruntime {subject}: {self.reason}.")


@dataclass(frozen=True)
class SessionSettings:
    """How onnxruntime runs a model.

    Attributes:
        optimize: whether ops are fused and laid out as in a deployment; else each computes on its own.
        threads: the number of threads of an op; None for all cores.
        fuse_integers: whether ops between roundings may run on integers, with other last bits than in float.
        as_megengine: whether denormal numbers are zero, as in MegEngine.
        spin: whether the threads wait actively between two runs, which takes the cores from others.
        profile: whether the times of nodes are recorded, for `OrtSession.end_profile`.
        optimized: whether the optimized model is kept, for `OrtSession.optimized`.
        tensors: the folder of the external tensors of a model that is given as bytes.
        host: the interpreter or machine that has onnxruntime; None for this process.
    """

    optimize: bool = True
    threads: int | None = None
    fuse_integers: bool = True
    as_megengine: bool = False
    spin: bool = True
    profile: bool = False
    optimized: bool = False
    tensors: Path | None = None
    host: RuntimeHost | None = None

    def request(self, tensors: str = "") -> dict[str, Any]:
        """Returns the settings as `worker.Onnxruntime` takes them.

        Args:
            tensors: the folder of the external tensors where the session runs.
        """
        entries = {
            "session.disable_quant_qdq": "" if self.fuse_integers else "1",
            "session.set_denormal_as_zero": "1" if self.as_megengine else "",
            "session.force_spinning_stop": "" if self.spin else "1",
            "session.model_external_initializers_file_folder_path": tensors,
        }
        return {
            "optimize": self.optimize,
            "threads": self.threads,
            "profile": self.profile,
            "optimized": self.optimized,
            "entries": {key: value for key, value in entries.items() if value},
        }


@dataclass(frozen=True)
class SessionValue:
    """An input or output of a session.

    Attributes:
        name: its name.
        type: its type as onnxruntime writes it, such as ``tensor(float)``.
        shape: its sizes; names, or None, for open ones.
    """

    name: str
    type: str
    shape: list[Any]


_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    **{f"tensor({kind})": kind for kind in ("int8", "int16", "int32", "int64")},
    **{f"tensor({kind})": kind for kind in ("uint8", "uint16", "uint32", "uint64")},
}


def dtype_of(kind: str) -> np.dtype[Any] | None:
    """Returns the numpy dtype of a type as onnxruntime writes it; None if numpy has none."""
    name = _DTYPES.get(kind)
    return None if name is None else np.dtype(name)


class OrtSession:
    """A model in onnxruntime, in this process or in that of a host.

    Args:
        model: a serialized model, or the path of a file.
        settings: how and where it runs.
        subject: the model in words, for messages.

    Attributes:
        inputs: its inputs.
        outputs: its outputs.
        side: the runtime's version, the interpreter and the machine of a host; empty for this process.

    Raises:
        SessionError: when onnxruntime cannot load the model.
        ExportError: when onnxruntime is not installed, or the host cannot be reached.
    """

    def __init__(self, model: bytes | str | Path, settings: SessionSettings, subject: str) -> None:
        self._subject = subject
        self._file: worker.Onnxruntime | RuntimeFile
        self.side: Mapping[str, Any] = {}
        try:
            self._file = self._open(model if isinstance(model, bytes) else Path(model), settings)
        except RefusalError as error:
            raise SessionError(f"cannot run {subject}", error.reason) from error
        self.inputs = [SessionValue(**each) for each in self._file.facts["inputs"]]
        self.outputs = [SessionValue(**each) for each in self._file.facts["outputs"]]

    def _open(self, model: bytes | Path, settings: SessionSettings) -> worker.Onnxruntime | RuntimeFile:
        if settings.host is not None:
            return self._open_at(settings.host, model, settings)
        if importlib.util.find_spec("onnxruntime") is None:
            raise ExportError(f"running ONNX files needs the package onnxruntime: run {install('onnx')}.")
        request = settings.request(str(settings.tensors or ""))
        path = "" if isinstance(model, bytes) else str(model)
        try:
            return worker.Onnxruntime({**request, "path": path}, [model])
        except onnxruntime_errors() as error:
            raise SessionError(f"cannot run {self._subject}", error) from error

    def _open_at(self, host: RuntimeHost, model: bytes | Path, settings: SessionSettings) -> RuntimeFile:
        child = RuntimeChild("onnxruntime", "onnxruntime", self._subject, host)
        try:
            if isinstance(model, Path):
                path = child.place(model, tensor_files(model) if host.runner else ())
                file, _ = child.open(path=path, **settings.request())
            else:
                folder = _place_tensors(child, model, settings.tensors)
                file, _ = child.open([np.frombuffer(model, np.uint8)], **settings.request(folder))
        except BaseException:
            child.close()
            raise
        self.side = child.side
        return file

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Runs the model once.

        Args:
            names: the outputs; None for all of them.
            feeds: input -> its value.

        Raises:
            SessionError: when onnxruntime refuses the inputs.
            ExportError: when the process of a host does not survive them, or the connection is lost.
        """
        try:
            if isinstance(self._file, RuntimeFile):
                outputs = None if names is None else list(names)
                return self._file.run(list(feeds.values()), feeds=list(feeds), names=outputs)
            values: list[np.ndarray] = self._file.session.run(names, dict(feeds))
        except RefusalError as error:
            raise SessionError("refused the input", error.reason) from error
        except onnxruntime_errors() as error:
            if isinstance(error, ExportError):
                raise
            raise SessionError("refused the input", error) from error
        return values

    def time(self, feeds: Mapping[str, np.ndarray]) -> float:
        """Returns the seconds of a run, by the clock of the machine that it runs on.

        Args:
            feeds: input -> its value; in the process of a host, those of the last run are taken.

        Raises:
            SessionError: when onnxruntime refuses the inputs.
        """
        if isinstance(self._file, RuntimeFile):
            return self._file.time()
        start = time.perf_counter()
        self.run(None, feeds)
        return time.perf_counter() - start

    def memory(self) -> int | None:
        """Returns the bytes that the model added to the process of a host at most; None for this process."""
        return self._file.memory() if isinstance(self._file, RuntimeFile) else None

    def end_profile(self) -> bytes:
        """Ends the profile and returns it, as JSON."""
        return self._file.profile()

    def optimized(self) -> bytes:
        """Returns the model as onnxruntime optimized it, without its large tensors."""
        return self._file.optimized()


def _place_tensors(child: RuntimeChild, data: bytes, folder: Path | None) -> str:
    """Copies the external tensors of a serialized model to where it runs, and returns their folder there."""
    if folder is None or child.host is None or not child.host.runner:
        return str(folder or "")
    import onnx

    files = tensor_files(folder / "model.onnx", onnx.load_from_string(data))
    return child.place_all(files, folder) if files else ""


def open_session(
    model: bytes | str | Path, settings: SessionSettings | None = None, subject: str = ""
) -> OrtSession:
    """Opens a model in onnxruntime.

    Args:
        model: a serialized model, or the path of a file.
        settings: how it runs; None for all optimizations and all cores.
        subject: the model in words, for messages; "" for its path.

    Raises:
        SessionError: when onnxruntime cannot load the model.
    """
    name = subject or ("a model" if isinstance(model, bytes) else str(model))
    return OrtSession(model, settings or SessionSettings(), name)


def onnxruntime_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that onnxruntime raises; its own have no base class but `Exception`."""
    if importlib.util.find_spec("onnxruntime") is None:  # it may be in an interpreter of its own alone
        return (RuntimeError, ValueError)
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = (t for t in vars(state).values() if isinstance(t, type) and issubclass(t, Exception))
    return (*own, RuntimeError, ValueError)
