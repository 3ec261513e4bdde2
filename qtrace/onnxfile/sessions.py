"""Opens files in onnxruntime and OpenVINO on CPU: in this process, or where a host has the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.onnxfile.external_data import onnx, tensor_files
from qtrace.onnxfile.local_session import LocalSession, OrtSession, SessionError, SessionSettings
from qtrace.runtimes import worker
from qtrace.runtimes.child import RefusalError, RuntimeChild, RuntimeFile
from qtrace.runtimes.host import RuntimeHost


class HostedSession(OrtSession):
    """A model in onnxruntime, in the process of a host.

    Args:
        model: a serialized model, or the path of a file.
        settings: how it runs.
        subject: the model in words, for messages.
        host: where it runs.

    Raises:
        SessionError: when onnxruntime cannot load the model.
        ExportError: when the host cannot be reached, or lacks onnxruntime.
    """

    _file: RuntimeFile

    def __init__(
        self, model: bytes | Path, settings: SessionSettings, subject: str, host: RuntimeHost
    ) -> None:
        try:
            child = RuntimeChild("onnxruntime", "onnxruntime", subject, host)
            file = _open_file(child, host, model, settings)
        except RefusalError as error:
            raise SessionError(f"cannot run {subject}", error.reason) from error
        self.side = child.side
        super().__init__(file)

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """See `OrtSession.run`."""
        outputs = None if names is None else list(names)
        try:
            return self._file.run(list(feeds.values()), feeds=list(feeds), names=outputs)
        except RefusalError as error:
            raise SessionError("refused the input", error.reason) from error

    def time(self, feeds: Mapping[str, np.ndarray]) -> float:
        """See `OrtSession.time`."""
        return self._file.time()

    def memory(self) -> int | None:
        """See `OrtSession.memory`."""
        return self._file.memory()


def _open_file(
    child: RuntimeChild, host: RuntimeHost, model: bytes | Path, settings: SessionSettings
) -> RuntimeFile:
    """Loads a model in the process of a host, to which its files are copied first."""
    try:
        if isinstance(model, Path):
            path = child.place(model, tensor_files(model) if host.runner else ())
            return child.open(path=path, **settings.request())[0]
        folder = _place_tensors(child, host, model, settings.tensors)
        return child.open([np.frombuffer(model, np.uint8)], **settings.request(folder))[0]
    except BaseException:
        child.close()
        raise


def _place_tensors(child: RuntimeChild, host: RuntimeHost, data: bytes, folder: Path | None) -> str:
    """Copies the external tensors of a serialized model to where it runs, and returns their folder there."""
    if folder is None or not host.runner:
        return str(folder or "")
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
        ExportError: when onnxruntime is not installed, or the host cannot be reached.
    """
    name = subject or ("a model" if isinstance(model, bytes) else str(model))
    settings, source = settings or SessionSettings(), model if isinstance(model, bytes) else Path(model)
    if settings.host is not None:
        return HostedSession(source, settings, name, settings.host)
    return LocalSession(source, settings, name)


class OpenvinoFile:
    """A model in OpenVINO.

    Args:
        model: a serialized model, or the path of a file.
        config: the settings that it is compiled with.
        path: the file, for messages.
        host: the interpreter or machine that has OpenVINO; None for this process.
        reshape: whether open sizes become the first run's, before which it is not compiled.

    Attributes:
        inputs: ``name``, ``names``, ``shape`` and ``dtype`` of each input.
        side: the version, the interpreter and the machine of a host; empty for this process.
        rounds_floats: whether the processor computes floats as bfloat16, unless the settings forbid it.

    Raises:
        RefusalError: when OpenVINO cannot load the model.
        ExportError: when the host cannot be reached.
    """

    def __init__(
        self,
        model: bytes | Path,
        config: Mapping[str, str],
        path: Path,
        host: RuntimeHost | None = None,
        reshape: bool = False,
    ) -> None:
        self._path = path
        self.side: Mapping[str, Any] = {}
        request = {"config": dict(config), "reshape": reshape}
        self._file: worker.Openvino | RuntimeFile
        if host is None:
            try:
                where = "" if isinstance(model, bytes) else str(model)
                self._file = worker.Openvino({**request, "path": where}, [model])
            except RuntimeError as error:  # OpenVINO raises no other type
                raise RefusalError(f"OpenVINO cannot run {path}", _shorten(error)) from error
        else:
            child = RuntimeChild("openvino", "OpenVINO", path, host)
            content = [np.frombuffer(model, np.uint8)] if isinstance(model, bytes) else []
            try:
                beside = () if isinstance(model, bytes) or not host.runner else tensor_files(model)
                where = "" if isinstance(model, bytes) else child.place(model, beside)
                self._file, _ = child.open(content, path=where, **request)
            except BaseException:
                child.close()
                raise
            self.side = child.side
        self.inputs: Sequence[Mapping[str, Any]] = self._file.facts["inputs"]
        self.rounds_floats: bool = self._file.facts["bfloat16"]

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs the model and returns its outputs.

        Args:
            inputs: an array for each of `inputs`.

        Raises:
            RefusalError: when OpenVINO refuses them.
            ExportError: when a host does not survive them.
        """
        try:
            if isinstance(self._file, RuntimeFile):
                return self._file.run(inputs)
            return self._file.run(inputs, {})
        except RefusalError:
            raise
        except RuntimeError as error:
            raise RefusalError(f"OpenVINO refused the input of {self._path}", _shorten(error)) from error

    def time(self) -> float:
        """Runs the model again on its last inputs and returns the seconds."""
        return self._file.time()

    def memory(self) -> int | None:
        """Returns the bytes that the model added to the process of a host at most; None for this process."""
        return self._file.memory() if isinstance(self._file, RuntimeFile) else None


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
