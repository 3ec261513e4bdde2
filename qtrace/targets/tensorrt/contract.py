"""What TensorRT 10 and 11 expect: explicit quantization."""

from __future__ import annotations

from onnx import TensorProto

from qtrace.extras.contracts.base import Contract
from qtrace.extras.contracts.rules import biases, files, parameters, placement, types, weights
from qtrace.extras.contracts.rules.parameters import scale_rules

__all__ = ["CONTRACT"]

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
        files.lowest_opset(_PARSER, 13),
        files.no_other_domains(_PARSER),
        files.no_integer_ops(_EXPLICIT),
        types.written_zero_points(_PARSER),
        *scale_rules(_PARSER, _PARSER),
        biases.float_biases(_PARSER),
        weights.weight_axis(_EXPLICIT),
        weights.symmetric_weights(_TYPES),
        weights.quantized_weights(_EXPLICIT, per_tensor=("Gemm", "MatMul")),
        types.activation_types(_TYPES, TensorProto.INT8),
        types.no_zero_points(_TYPES),
        parameters.one_scale_per_activation(_TYPES),
        parameters.no_needless_axis(_PARSER),
        placement.unrounded_functions(_EXPLICIT),
        placement.unrounded_summands(_TOOL),
        placement.shared_scales(_TOOL),
    ),
    ops=frozenset(_TENSORRT_OPS.split()),
    fused=frozenset(_FUSED.split()),
    rounds_results=frozenset(),
)
