"""What AMD's Ryzen AI expects: symmetric integers in A8W8, A16W8 and XINT8."""

from __future__ import annotations

from dataclasses import replace

from onnx import TensorProto

from qtrace.extras.contracts.base import CPU, Contract
from qtrace.extras.contracts.rules import biases, files, parameters, placement, types, weights
from qtrace.extras.contracts.rules.parameters import ONNX_OPERATORS, scale_rules

__all__ = ["CONTRACT", "XINT8_CONTRACT"]

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
        files.no_integer_ops(_RYZEN),
        types.native_wide_types(ONNX_OPERATORS),
        *scale_rules(ONNX_OPERATORS, _RYZEN),
        weights.symmetric_weights(_QUARK),
        weights.quantized_weights(_QUARK, per_tensor=("MatMul", "Gemm")),
        types.activation_types(_QUARK, TensorProto.INT8, TensorProto.INT16),
        types.no_zero_points(_QUARK),
        parameters.one_scale_per_activation(_QUARK),
        placement.shared_scales(_QUARK),
        biases.int32_biases(_QUARK),
        biases.accumulator_biases(_QUARK),
        placement.equal_types(_QUARK, *_ELEMENTWISE),
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
        files.no_integer_ops(_RYZEN),
        files.no_other_domains(_RYZEN),
        *scale_rules(ONNX_OPERATORS, _RYZEN),
        weights.symmetric_weights(_QUARK),
        weights.quantized_weights(_QUARK, per_tensor=("MatMul", "Gemm", "Conv", "ConvTranspose")),
        types.activation_types(_QUARK, TensorProto.INT8),
        types.no_zero_points(_QUARK),
        parameters.one_scale_per_activation(_QUARK),
        placement.shared_scales(_QUARK),
        biases.int8_biases(_QUARK),
        parameters.power_of_two_scales(_QUARK),
    ),
)
