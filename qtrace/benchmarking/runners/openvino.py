"""Times ONNX files in OpenVINO on CPU."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from qtrace.benchmarking.runners.base import Load, RunnerSettings, fixed_shape, random_values
from qtrace.errors import ExportError

__all__ = ["LOAD"]


class OpenvinoRunner:
    """A compiled model with inputs."""

    in_thread = False

    def __init__(self, path: Path, settings: RunnerSettings) -> None:
        import openvino

        options = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": str(settings.threads),
        }
        try:
            core = openvino.Core()
            model = core.read_model(str(path))
            shapes = {}
            for each in model.inputs:
                name = each.get_any_name()
                sizes = [d.get_length() if d.is_static else None for d in each.partial_shape]
                shapes[name] = fixed_shape(name, sizes, settings)
            model.reshape({name: list(shape) for name, shape in shapes.items()})
            self._request = core.compile_model(model, "CPU", options).create_infer_request()
        except RuntimeError as error:  # OpenVINO raises no other type
            raise ExportError(f"OpenVINO cannot run {path}: {' '.join(str(error).split())[:300]}") from error
        kinds = {each.get_any_name(): np.dtype(each.element_type.to_dtype()) for each in model.inputs}
        self._feeds = {name: random_values(shape, kinds[name]) for name, shape in shapes.items()}
        self.samples = next((shape[0] for shape in shapes.values() if shape), 1)

    def run(self) -> float:
        """Runs the file once and returns the seconds that it took."""
        start = time.perf_counter()
        self._request.infer(self._feeds)
        return time.perf_counter() - start

    def memory(self) -> None:
        """Returns None: the file runs in this process."""


LOAD = Load("openvino", "openvino", "openvino", (".onnx",), OpenvinoRunner, default=False)
