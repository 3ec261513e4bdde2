"""Which ops of an ONNX file onnxruntime computes with integer kernels, and why not the others."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError
from qtrace.verification.runtimes.base import Kernels

__all__ = ["kernels"]

# The ops that compute; those that only move values run on whatever type they are given.
_COMPUTING = (
    "Conv ConvTranspose Gemm MatMul Add Sub Mul Div Concat AveragePool GlobalAveragePool MaxPool ReduceMean "
    "Sigmoid LeakyRelu Softmax Tanh HardSigmoid HardSwish Resize"
)
_WITHOUT = "ConvTranspose Sub Div ReduceMean HardSigmoid HardSwish Tanh"
_NOT_ROUNDED = "its result is not rounded"
_MOVES = "MaxPool Resize Transpose Reshape Flatten Concat Split Slice Squeeze Unsqueeze Gather Pad"


def kernels(path: Path) -> Kernels:
    """Optimizes the file as for deployment and looks what became of its quantized ops.

    An op counts when it reads dequantized integers.

    Raises:
        ExportError: when onnxruntime cannot run the file.
    """
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    made_by = {name: node for node in model.graph.node for name in node.output}
    readers: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    final = _optimized(path)
    integers = _integer_tensors(final)
    left = {node.name: node for node in final.graph.node}
    names, floats = [], []
    for node in model.graph.node:
        sources = [made_by.get(name) for name in node.input]
        quantized = any(s is not None and s.op_type == "DequantizeLinear" for s in sources)
        if node.op_type not in _COMPUTING.split() or not quantized:
            continue
        after = left.get(node.name)
        if after is None or _is_integer(after, integers):
            names.append(node.output[0])
        else:
            floats.append((node.output[0], node.op_type, _why(node, made_by, readers)))
    return Kernels(tuple(names), tuple(floats))


def _optimized(path: Path) -> Any:
    import onnx
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        options.log_severity_level = 3
        # Large tensors go to a file of their own: a model in one piece holds 2 GB at most.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "tensors")
        try:
            ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ExportError(f"onnxruntime cannot run {path}: {error}") from error
        return onnx.load(options.optimized_model_filepath, load_external_data=False)


def _integer_tensors(model: Any) -> set[str]:
    found: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" or _is_integer(node, found):
            found.update(node.output)
    return found


def _is_integer(node: Any, integers: set[str]) -> bool:
    if node.op_type.startswith("QLinear") or node.op_type in ("QGemm", "MatMulInteger", "ConvInteger"):
        return True
    if node.op_type == "MatMulIntegerToFloat":
        return True
    return node.op_type in _MOVES.split() and any(name in integers for name in node.input)


def _why(node: Any, made_by: Mapping[str, Any], readers: Mapping[str, list[Any]]) -> str:
    """Why no integer kernel computes an op, such as a QuantizeLinear that is missing behind it."""
    if node.op_type in _WITHOUT.split():
        return f"onnxruntime has no integer kernel for {node.op_type}"
    data = node.input[:1] if node.op_type == "Resize" else node.input  # its others are sizes
    sources = [made_by[name].op_type for name in data if name in made_by]
    floats = [kind for kind in sources if kind not in ("DequantizeLinear", "Constant")]
    if floats:
        return f"it reads the float result of {_listed(floats)}, not integers"
    after = [n.op_type for n in readers.get(node.output[0], [])]
    if "Clip" in after:
        return (
            "its result is clipped to fewer values than its integers can hold, and onnxruntime fuses no Clip "
            "between an op and its rounding"
        )
    others = [kind for kind in after if kind not in ("QuantizeLinear", "Relu")]
    if len(others) == len(after):
        return _NOT_ROUNDED + (f": {_listed(others)} reads it in float" if others else "")
    if others:
        return f"its result is rounded, but {_listed(others)} reads it in float, too"
    return "onnxruntime has an integer kernel for this op, but not with these attributes, types or shapes"


def _listed(kinds: list[str]) -> str:
    return " and ".join(dict.fromkeys(kinds))
