"""What TensorRT 10 and 11 expect: explicit quantization."""

from __future__ import annotations

from onnx import TensorProto

from qtrace.extras.contracts import graph_rules, quantizer_rules, tensor_rules
from qtrace.extras.contracts.base import Contract
from qtrace.extras.contracts.quantizer_rules import scale_rules

_EXPLICIT = "NVIDIA TensorRT documentation, Explicit Quantization"
_TYPES = "NVIDIA TensorRT documentation, Working with Quantized Types"
_PARSER = "ONNX-TensorRT, Supported ONNX Operators, QuantizeLinear and DequantizeLinear"
_TOOL = "NVIDIA TensorRT Model Optimizer, ONNX post-training quantization"

_TENSORRT_OPS = (
    "Conv ConvTranspose Gemm MatMul Add Mul AveragePool GlobalAveragePool MaxPool BatchNormalization Clip "
    "Concat"
)
_FUSED = "Relu Clip LeakyRelu PRelu Sigmoid HardSigmoid HardSwish Tanh Elu Mish Mul Add BatchNormalization"

CONTRACT = Contract(
    name="tensorrt",
    title="TensorRT 10 and 11",
    rules=(
        graph_rules.lowest_opset(_PARSER, 13),
        graph_rules.no_other_domains(_PARSER),
        graph_rules.no_integer_ops(_EXPLICIT),
        quantizer_rules.written_zero_points(_PARSER),
        *scale_rules(_PARSER, _PARSER),
        tensor_rules.float_biases(_PARSER),
        tensor_rules.weight_axis(_EXPLICIT),
        tensor_rules.symmetric_weights(_TYPES),
        tensor_rules.quantized_weights(_EXPLICIT, per_tensor=("Gemm", "MatMul")),
        quantizer_rules.activation_types(_TYPES, TensorProto.INT8),
        quantizer_rules.no_zero_points(_TYPES),
        quantizer_rules.one_scale_per_activation(_TYPES),
        quantizer_rules.no_needless_axis(_PARSER),
        graph_rules.unrounded_functions(_EXPLICIT),
        graph_rules.unrounded_summands(_TOOL),
        graph_rules.shared_scales(_TOOL),
    ),
    ops=frozenset(_TENSORRT_OPS.split()),
    fused=frozenset(_FUSED.split()),
    rounds_results=frozenset(),
)
