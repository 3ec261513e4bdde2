"""What AMD's Ryzen AI expects: symmetric integers in A8W8, A16W8 and XINT8."""

from __future__ import annotations

from dataclasses import replace

from onnx import TensorProto

from qtrace.extras.contracts import graph_rules, quantizer_rules, tensor_rules
from qtrace.extras.contracts.base import CPU, Contract

_RYZEN = "Ryzen AI Software documentation, Model Quantization"
_QUARK = "AMD Quark documentation, Quark for ONNX"

_RYZENAI_OPS = (
    "Conv ConvTranspose Gemm MatMul Add Sub Mul Div Relu Clip LeakyRelu PRelu Sigmoid Tanh HardSwish "
    "HardSigmoid Softmax LayerNormalization AveragePool GlobalAveragePool MaxPool ReduceMean Concat Resize "
    "BatchNormalization"
)
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div")

CONTRACT = Contract(
    name="ryzenai",
    title="Ryzen AI, A8W8 and A16W8",
    rules=(
        graph_rules.no_integer_ops(_RYZEN),
        quantizer_rules.native_wide_types(quantizer_rules.ONNX_OPERATORS),
        *quantizer_rules.scale_rules(quantizer_rules.ONNX_OPERATORS, _RYZEN),
        tensor_rules.symmetric_weights(_QUARK),
        tensor_rules.quantized_weights(_QUARK, per_tensor=("MatMul", "Gemm")),
        quantizer_rules.activation_types(_QUARK, TensorProto.INT8, TensorProto.INT16),
        quantizer_rules.no_zero_points(_QUARK),
        quantizer_rules.one_scale_per_activation(_QUARK),
        graph_rules.shared_scales(_QUARK),
        tensor_rules.int32_biases(_QUARK),
        tensor_rules.accumulator_biases(_QUARK),
        graph_rules.equal_types(_QUARK, *_ELEMENTWISE),
    ),
    ops=frozenset(_RYZENAI_OPS.split()),
    fused=frozenset({"Relu", "Clip"}),
    rounds_results=frozenset(_RYZENAI_OPS.split()),
    floats_run_on=CPU,
)


# AMD's Ryzen AI in XINT8: symmetric int8 with scales that are powers of two, biases too.
XINT8_CONTRACT = replace(
    CONTRACT,
    name="ryzenai_xint8",
    title="Ryzen AI, XINT8",
    rules=(
        graph_rules.no_integer_ops(_RYZEN),
        graph_rules.no_other_domains(_RYZEN),
        *quantizer_rules.scale_rules(quantizer_rules.ONNX_OPERATORS, _RYZEN),
        tensor_rules.symmetric_weights(_QUARK),
        tensor_rules.quantized_weights(_QUARK, per_tensor=("MatMul", "Gemm", "Conv", "ConvTranspose")),
        quantizer_rules.activation_types(_QUARK, TensorProto.INT8),
        quantizer_rules.no_zero_points(_QUARK),
        quantizer_rules.one_scale_per_activation(_QUARK),
        graph_rules.shared_scales(_QUARK),
        tensor_rules.int8_biases(_QUARK),
        quantizer_rules.power_of_two_scales(_QUARK),
    ),
)
