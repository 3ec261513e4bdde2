"""Runs an ONNX file in onnxruntime, with all its integer tensors as outputs.

It runs in this process, unlike LiteRT and ncnn. onnxruntime raises an exception for what it cannot load or
run: none of 150 files with bytes changed at random ended the process. A child would cost 0.4 s each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qtrace.errors import ExportError
from qtrace.process.onnxruntime import onnxruntime_errors
from qtrace.verification.runtimes._onnx import as_declared, check_samples, with_integer_outputs
from qtrace.verification.runtimes._onnx_kernels import kernels
from qtrace.verification.runtimes.base import Runtime, RuntimeRun

__all__ = ["RUNTIME"]


class OnnxSession:
    """Runs an ONNX file on CPU.

    With optimizations, the outputs come from the file as it is, and the integers from a copy in which they
    are outputs, across which onnxruntime does not fuse.
    """

    def __init__(self, path: Path, optimize: bool) -> None:
        import onnxruntime as ort

        model = with_integer_outputs(path)
        self.output_names, self.tensor_names = model.outputs, model.tensors
        self.integer_names: Sequence[str] = model.integers
        self.graph_hash, self.fixed_samples = model.graph_hash, model.fixed_samples
        options = ort.SessionOptions()
        levels = ort.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
        options.log_severity_level = 3
        if model.folder is not None:
            key = "session.model_external_initializers_file_folder_path"
            options.add_session_config_entry(key, str(model.folder))
        providers = ["CPUExecutionProvider"]
        try:
            self.session = ort.InferenceSession(model.data, options, providers=providers)
            self.deployed = (
                ort.InferenceSession(model.deployed or str(path), options, providers=providers)
                if optimize
                else None
            )
        except onnxruntime_errors() as error:
            raise ExportError(f"onnxruntime cannot run {path}: {error}") from error
        inputs = self.session.get_inputs()
        self.input_names = [i.name for i in inputs]
        self.input_types = [i.type[len("tensor(") : -1] for i in inputs]

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        """Runs the model; see `Session`."""
        if len(inputs) != len(self.input_names):
            raise ExportError(f"the model takes {len(self.input_names)} inputs, not {len(inputs)}.")
        check_samples(self.fixed_samples, self.input_names, inputs)
        names = [*self.output_names, *self.tensor_names]
        feeds = dict(zip(self.input_names, as_declared(inputs, self.input_types), strict=True))
        try:
            values = self.session.run(names, feeds)
            outputs = None if self.deployed is None else self.deployed.run(self.output_names, feeds)
        except onnxruntime_errors() as error:
            raise ExportError(f"onnxruntime refused the input: {error}") from error
        count = len(self.output_names)
        return RuntimeRun(
            values[:count] if outputs is None else outputs,
            dict(zip(self.integer_names, values[count:], strict=True)),
        )


RUNTIME = Runtime("onnxruntime", "onnxruntime", "onnx", (".onnx",), OnnxSession, kernels)
