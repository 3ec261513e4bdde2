"""Runs an ONNX file in OpenVINO on CPU, with all its integer tensors as outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qtrace.errors import ExportError
from qtrace.verification.runtimes._onnx import as_declared, with_integer_outputs
from qtrace.verification.runtimes.base import Runtime, RuntimeRun

__all__ = ["RUNTIME"]

# These settings make OpenVINO compute each op as it is written. Its low-precision transformations drop the
# rounding on skip branches, dynamic quantization rounds the inputs of linear layers again, in groups, and the
# default precision on some CPUs is bfloat16.
_PLAIN = {
    "INFERENCE_PRECISION_HINT": "f32",
    "LP_TRANSFORMS_MODE": "NO",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}


class OpenvinoSession:
    """Runs an ONNX file on CPU.

    With optimizations, the outputs come from the file as it is, and the integers from a copy in which they
    are outputs.
    """

    def __init__(self, path: Path, optimize: bool) -> None:
        import openvino

        model = with_integer_outputs(path)
        self.output_names = model.outputs
        self.integer_names: Sequence[str] = model.integers
        self.graph_hash = model.graph_hash
        if model.folder is not None:
            raise ExportError(f"{path} has more than 2 GB of tensors: verify it in onnxruntime.")
        core = openvino.Core()
        settings = {"INFERENCE_PRECISION_HINT": "f32"} if optimize else _PLAIN
        try:
            self.compiled = core.compile_model(core.read_model(model.data), "CPU", settings)
            self.deployed = (
                core.compile_model(core.read_model(model.deployed or str(path)), "CPU", settings)
                if optimize
                else None
            )
        except RuntimeError as error:  # OpenVINO raises no other type
            raise ExportError(f"OpenVINO cannot run {path}: {error}") from error

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        """Runs the model; see `Session`."""
        if len(inputs) != len(self.compiled.inputs):
            raise ExportError(f"the model takes {len(self.compiled.inputs)} inputs, not {len(inputs)}.")
        inputs = as_declared(inputs, [str(i.element_type.to_dtype()) for i in self.compiled.inputs])
        try:
            results = self.compiled(inputs)
            deployed = None if self.deployed is None else self.deployed(inputs)
        except RuntimeError as error:
            raise ExportError(f"OpenVINO refused the input: {error}") from error
        values = [np.array(results[i]) for i in range(len(self.compiled.outputs))]
        count = len(self.output_names)
        outputs = values[:count] if deployed is None else [np.array(deployed[i]) for i in range(count)]
        return RuntimeRun(outputs, dict(zip(self.integer_names, values[count:], strict=True)))


RUNTIME = Runtime("openvino", "openvino", "openvino", (".onnx",), OpenvinoSession, default=False)
