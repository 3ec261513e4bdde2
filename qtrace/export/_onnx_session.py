"""An ONNX file in onnxruntime, with all its integer tensors as outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qtrace.errors import ExportError

__all__ = ["OnnxRun", "OnnxSession"]


@dataclass(frozen=True)
class OnnxRun:
    """What one run gave: the model's outputs, and every integer tensor by name."""

    outputs: list[np.ndarray]
    integers: dict[str, np.ndarray]


class OnnxSession:
    """Runs an ONNX file on CPU.

    Args:
        path: the file.
        optimize: all graph optimizations (integer kernels), or none.

    Raises:
        ExportError: when the file cannot be read or run.
    """

    def __init__(self, path: Path, optimize: bool) -> None:
        import onnx
        import onnxruntime as ort

        if not path.is_file():
            raise ExportError(f"{path} does not exist: export the module first.")
        try:
            model = onnx.load(str(path))
        except Exception as error:
            raise ExportError(f"{path} is not an ONNX file: {error}") from error
        self.output_names = [o.name for o in model.graph.output]
        self.integer_names: list[str] = []
        stored = {t.name: t.data_type for t in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "QuantizeLinear":
                name = node.output[0]
                self.integer_names.append(name)
                model.graph.output.append(
                    onnx.helper.make_tensor_value_info(name, stored[node.input[2]], None)
                )
        options = ort.SessionOptions()
        levels = ort.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
        options.log_severity_level = 3
        try:
            data = model.SerializeToString()
            self.session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ExportError(f"onnxruntime cannot run {path}: {error}") from error
        self.input_names = [i.name for i in self.session.get_inputs()]

    def run(self, inputs: list[np.ndarray]) -> OnnxRun:
        """Runs the model.

        Args:
            inputs: one array for each input, in order.

        Raises:
            ExportError: when they do not fit.
        """
        if len(inputs) != len(self.input_names):
            raise ExportError(f"the model takes {len(self.input_names)} inputs, not {len(inputs)}.")
        names = [*self.output_names, *self.integer_names]
        try:
            values = self.session.run(names, dict(zip(self.input_names, inputs, strict=True)))
        except Exception as error:
            raise ExportError(f"onnxruntime refused the input: {error}") from error
        count = len(self.output_names)
        return OnnxRun(values[:count], dict(zip(self.integer_names, values[count:], strict=True)))
