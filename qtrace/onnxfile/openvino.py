"""ONNX files that OpenVINO has loaded on CPU, in this process or in a host's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.onnxfile.external_data import tensor_files
from qtrace.runtimes import worker
from qtrace.runtimes.child import RefusalError
from qtrace.runtimes.files import RuntimeChild, RuntimeFile
from qtrace.runtimes.host import RuntimeHost

__all__ = ["OpenvinoFile"]


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
