"""What onnxruntime on CPU expects of a quantized file."""

from __future__ import annotations

from onnx import TensorProto

from qtrace.extras.contracts import quantizer_rules, tensor_rules
from qtrace.extras.contracts.base import Contract
from qtrace.extras.contracts.quantizer_rules import ONNX_OPERATORS, scale_rules

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
        quantizer_rules.native_wide_types(ONNX_OPERATORS),
        *scale_rules(ONNX_OPERATORS, _QUANTIZE),
        quantizer_rules.activation_types(ONNX_OPERATORS, *_ORT_TYPES, TensorProto.INT4),
        tensor_rules.weight_axis(_QUANTIZE),
        tensor_rules.quantized_weights(_QUANTIZE, per_tensor=("MatMul", "Gemm")),
        quantizer_rules.one_scale_per_activation(_QUANTIZE),
        tensor_rules.accumulator_biases(_QUANTIZE),
    ),
    ops=frozenset(_ONNXRUNTIME_OPS.split()),
    fused=frozenset({"Relu", "Clip"}),
    rounds_results=frozenset(_ONNXRUNTIME_OPS.split()) - {"Gemm", "MatMul"},
    measured=True,
)
