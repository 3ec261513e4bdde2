"""Files in onnxruntime: from inputs to outputs, and how long that takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


class Runner:
    """An ONNX file in onnxruntime, on one thread, with all of its optimizations."""

    def __init__(self, file: Path) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3  # warnings about initializers that nothing reads are none of ours
        self.session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self.input = self.session.get_inputs()[0].name

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        """Returns the first output."""
        return self.session.run(None, {self.input: batch})[0]

    def run_in_batches(self, samples: np.ndarray, size: int = 8) -> np.ndarray:
        """Returns the first output of all samples."""
        return np.concatenate([self(samples[i : i + size]) for i in range(0, len(samples), size)])


def measure_latencies(
    runners: Mapping[str, Runner], samples: Sequence[np.ndarray], rounds: int
) -> dict[str, float]:
    """Measures the smallest time of a run, in milliseconds.

    The runners take turns, so that a change of the machine's load meets all of them.

    Args:
        runners: the files by their names.
        samples: inputs, one for each run in turn.
        rounds: how often each runs.
    """
    best = dict.fromkeys(runners, float("inf"))
    for runner in runners.values():
        runner(samples[0])
    for index in range(rounds):
        for name, runner in runners.items():
            sample = samples[index % len(samples)]
            started = time.perf_counter()
            runner(sample)
            best[name] = min(best[name], 1000 * (time.perf_counter() - started))
    return best
