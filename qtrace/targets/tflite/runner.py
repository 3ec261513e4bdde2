"""Times TFLite files in LiteRT on CPU, with the kernels that it chooses by default (XNNPACK).

LiteRT aborts its process for some files, so that it runs, and reads the clock, in a child.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qtrace.benchmarking.runners import Load, RunnerSettings, fixed_shape, random_values
from qtrace.runtimes.child import RuntimeChild


class LitertRunner:
    """An interpreter with inputs."""

    in_thread = False

    def __init__(self, path: Path, settings: RunnerSettings) -> None:
        child = RuntimeChild("litert", "LiteRT", path, settings.host)
        self._file, facts = child.open([np.fromfile(path, np.uint8)], fuse=True, threads=settings.threads)
        values = []
        for detail in facts["inputs"]:
            shape = fixed_shape(detail["name"], detail["signature"], settings)
            values.append(random_values(shape, np.dtype(detail["dtype"])))
        self._file.run(values)
        self.side = child.side if settings.host is not None else {}
        self.samples = next((value.shape[0] for value in values if value.ndim), 1)

    def run(self) -> float:
        """Runs the file once and returns the seconds that it took."""
        return self._file.time()

    def memory(self) -> int:
        """Returns the bytes that the file added to the child process at most."""
        return self._file.memory()


LOAD = Load("litert", "ai_edge_litert", "tflite", (".tflite",), LitertRunner)
