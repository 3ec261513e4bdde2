"""Times TFLite files in LiteRT on CPU, with the kernels that it chooses by default (XNNPACK)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qtrace.benchmarking.runners.base import Load, Settings, fixed_shape, random_values
from qtrace.errors import ExportError

__all__ = ["LOAD"]


class LitertRunner:
    """An interpreter with inputs."""

    def __init__(self, path: Path, settings: Settings) -> None:
        from ai_edge_litert.interpreter import Interpreter

        try:
            self._loaded = Interpreter(str(path), num_threads=settings.threads)
            details = self._loaded.get_input_details()
            shapes = []
            for detail in details:
                sizes = [int(n) for n in detail["shape_signature"]]
                shapes.append(fixed_shape(detail["name"], sizes, settings))
                self._loaded.resize_tensor_input(detail["index"], shapes[-1])
            self._loaded.allocate_tensors()
            for detail, shape in zip(details, shapes, strict=True):
                self._loaded.set_tensor(detail["index"], random_values(shape, np.dtype(detail["dtype"])))
        except (RuntimeError, ValueError) as error:
            raise ExportError(f"LiteRT cannot run {path}: {' '.join(str(error).split())[:300]}") from error
        self.samples = next((shape[0] for shape in shapes if shape), 1)

    def run(self) -> None:
        """Runs the file once."""
        self._loaded.invoke()


LOAD = Load("litert", "ai_edge_litert", "tflite", (".tflite",), LitertRunner)
