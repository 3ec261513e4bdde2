"""What onnxruntime on CPU expects of a quantized file."""

from __future__ import annotations

from onnx import TensorProto

from qtrace.extras.contracts.base import Contract
from qtrace.extras.contracts.rules import biases, parameters, types, weights
from qtrace.extras.contracts.rules.parameters import ONNX_OPERATORS, scale_rules

__all__ = ["CONTRACT"]

_QUANTIZE = "ONNX Runtime documentation, Quantize ONNX Models"

_ONNXRUNTIME_OPS = (
    "Conv Gemm MatMul Add Mul Concat AveragePool GlobalAveragePool MaxPool Sigmoid LeakyRelu Softmax Resize "
    "Where Relu Clip"
)
_ORT_TYPES = (TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16, TensorProto.UINT4)

CONTRACT = Contract(
    name="onnxruntime",
    title="onnxruntime on CPU",
    rules=(
        types.native_wide_types(ONNX_OPERATORS),
        *scale_rules(ONNX_OPERATORS, _QUANTIZE),
        types.activation_types(ONNX_OPERATORS, *_ORT_TYPES, TensorProto.INT4),
        weights.weight_axis(_QUANTIZE),
        weights.quantized_weights(_QUANTIZE, per_tensor=("MatMul", "Gemm")),
        parameters.one_scale_per_activation(_QUANTIZE),
        biases.accumulator_biases(_QUANTIZE),
    ),
    ops=frozenset(_ONNXRUNTIME_OPS.split()),
    fused=frozenset({"Relu", "Clip"}),
    rounds_results=frozenset(_ONNXRUNTIME_OPS.split()) - {"Gemm", "MatMul"},
    measured=True,
)
