"""An ONNX file in OpenVINO on CPU, with all its integer tensors as outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qtrace.errors import ExportError
from qtrace.verification.runtimes._onnx import with_integer_outputs
from qtrace.verification.runtimes.base import Run, Runtime

__all__ = ["RUNTIME"]

# Each op as it is written: OpenVINO's low-precision transformations drop the rounding on skip branches, it
# rounds what linear layers read anew, in groups, and its default precision on some CPUs is bfloat16.
_PLAIN = {
    "INFERENCE_PRECISION_HINT": "f32",
    "LP_TRANSFORMS_MODE": "NO",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}


class _Session:
    """Runs an ONNX file on CPU.

    Optimized, the outputs are those of the file as it is, and the integers come from a copy in which they are
    outputs.
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
        try:
            read = core.read_model(model.data)
            settings = {"INFERENCE_PRECISION_HINT": "f32"} if optimize else _PLAIN
            self.compiled = core.compile_model(read, "CPU", settings)
            plain = core.read_model(str(path)) if optimize else None
            self.plain = None if plain is None else core.compile_model(plain, "CPU", settings)
        except Exception as error:
            raise ExportError(f"OpenVINO cannot run {path}: {error}") from error

    def run(self, inputs: list[np.ndarray]) -> Run:
        """Runs the model; see `Session`."""
        if len(inputs) != len(self.compiled.inputs):
            raise ExportError(f"the model takes {len(self.compiled.inputs)} inputs, not {len(inputs)}.")
        try:
            found = self.compiled(inputs)
            ends = None if self.plain is None else self.plain(inputs)
        except Exception as error:
            raise ExportError(f"OpenVINO refused the input: {error}") from error
        values = [np.array(found[i]) for i in range(len(self.compiled.outputs))]
        count = len(self.output_names)
        outputs = values[:count] if ends is None else [np.array(ends[i]) for i in range(count)]
        return Run(outputs, dict(zip(self.integer_names, values[count:], strict=True)))


RUNTIME = Runtime("openvino", "openvino", "openvino", (".onnx",), _Session, default=False)
