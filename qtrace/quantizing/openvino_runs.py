"""The files of labellings in OpenVINO, whose noise is measured there for its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from qtrace.onnxfile.local_session import SessionValue
from qtrace.onnxfile.openvino import OpenvinoFile
from qtrace.onnxfile.reading import read_model
from qtrace.runtimes.host import RuntimeHost

__all__ = ["OpenvinoRuns"]

# As the file is timed. The default precision on some CPUs is bfloat16, which is no noise of the integers.
_SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1"}


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
            feeds: input -> its value; a compiled model has no port for an input that nothing reads.

        Raises:
            ExportError: when OpenVINO refuses the inputs.
        """
        return self._file.run([_value_of(port["names"], feeds, port["dtype"]) for port in self._file.inputs])


def _value_of(names: Sequence[str], feeds: Mapping[str, np.ndarray], dtype: str) -> np.ndarray:
    """Returns the value of the port with the ``names``, in its type."""
    return next(feeds[name] for name in names if name in feeds).astype(np.dtype(dtype), copy=False)
