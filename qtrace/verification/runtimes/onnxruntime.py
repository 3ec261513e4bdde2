"""An ONNX file in onnxruntime, with all its integer tensors as outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qtrace.errors import ExportError
from qtrace.verification.runtimes._onnx import with_integer_outputs
from qtrace.verification.runtimes._onnx_kernels import kernels
from qtrace.verification.runtimes.base import Run, Runtime

__all__ = ["RUNTIME"]


class _Session:
    """Runs an ONNX file on CPU.

    Optimized, the outputs are those of the file as it is; the integers come from a copy in which they are
    outputs, which keeps onnxruntime from fusing across them.
    """

    def __init__(self, path: Path, optimize: bool) -> None:
        import onnxruntime as ort

        model = with_integer_outputs(path)
        self.output_names, self.tensor_names = model.outputs, model.tensors
        self.integer_names: Sequence[str] = model.integers
        self.graph_hash = model.graph_hash
        options = ort.SessionOptions()
        levels = ort.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
        options.log_severity_level = 3
        if model.folder is not None:
            key = "session.model_external_initializers_file_folder_path"
            options.add_session_config_entry(key, str(model.folder))
        try:
            providers = ["CPUExecutionProvider"]
            self.session = ort.InferenceSession(model.data, options, providers=providers)
            self.plain = ort.InferenceSession(str(path), options, providers=providers) if optimize else None
        except Exception as error:
            raise ExportError(f"onnxruntime cannot run {path}: {error}") from error
        self.input_names = [i.name for i in self.session.get_inputs()]

    def run(self, inputs: list[np.ndarray]) -> Run:
        """Runs the model; see `Session`."""
        if len(inputs) != len(self.input_names):
            raise ExportError(f"the model takes {len(self.input_names)} inputs, not {len(inputs)}.")
        names = [*self.output_names, *self.tensor_names]
        given = dict(zip(self.input_names, inputs, strict=True))
        try:
            values = self.session.run(names, given)
            ends = None if self.plain is None else self.plain.run(self.output_names, given)
        except Exception as error:
            raise ExportError(f"onnxruntime refused the input: {error}") from error
        count = len(self.output_names)
        return Run(
            values[:count] if ends is None else ends,
            dict(zip(self.integer_names, values[count:], strict=True)),
        )


RUNTIME = Runtime("onnxruntime", "onnxruntime", "onnx", (".onnx",), _Session, kernels)
