"""Times ONNX files in OpenVINO on CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qtrace.benchmarking.runners import Load, RunnerSettings, fixed_shape, random_values
from qtrace.onnxfile.sessions import OpenvinoFile


class OpenvinoRunner:
    """A compiled model with inputs."""

    in_thread = False

    def __init__(self, path: Path, settings: RunnerSettings) -> None:
        options = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": str(settings.threads),
        }
        self._file = OpenvinoFile(path, options, path, settings.host, reshape=True)
        self.side = self._file.side
        values = []
        for port in self._file.inputs:
            shape = fixed_shape(port["name"], port["shape"], settings)
            values.append(random_values(shape, np.dtype(port["dtype"])))
        self._file.run(values)
        self.samples = next((value.shape[0] for value in values if value.ndim), 1)

    def run(self) -> float:
        """Runs the file once and returns the seconds that it took."""
        return self._file.time()

    def memory(self) -> int | None:
        """Returns the bytes that the file added to the process of a host; None where it runs in this one."""
        return self._file.memory()


LOAD = Load("openvino", "openvino", "openvino", (".onnx",), OpenvinoRunner, default=False)
