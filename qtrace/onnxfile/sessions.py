"""Opens models in onnxruntime on CPU: in this process, or in an interpreter or on a machine that has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from qtrace.onnxfile.external_data import tensor_files
from qtrace.onnxfile.local_session import LocalSession, OrtSession, SessionError, SessionSettings
from qtrace.runtimes.child import RefusalError
from qtrace.runtimes.files import RuntimeChild, RuntimeFile
from qtrace.runtimes.host import RuntimeHost

__all__ = ["HostedSession", "open_session"]


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

    def __init__(
        self, model: bytes | Path, settings: SessionSettings, subject: str, host: RuntimeHost
    ) -> None:
        try:
            child = RuntimeChild("onnxruntime", "onnxruntime", subject, host)
            self._file = _open_file(child, host, model, settings)
        except RefusalError as error:
            raise SessionError(f"cannot run {subject}", error.reason) from error
        self.side = child.side
        super().__init__(self._file.facts)

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

    def end_profile(self) -> bytes:
        """See `OrtSession.end_profile`."""
        return self._file.profile()

    def optimized(self) -> bytes:
        """See `OrtSession.optimized`."""
        return self._file.optimized()


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
        ExportError: when onnxruntime is not installed, or the host cannot be reached.
    """
    name = subject or ("a model" if isinstance(model, bytes) else str(model))
    settings, source = settings or SessionSettings(), model if isinstance(model, bytes) else Path(model)
    if settings.host is not None:
        return HostedSession(source, settings, name, settings.host)
    return LocalSession(source, settings, name)
