"""AMD's Ryzen AI in XINT8: symmetric int8 with scales that are powers of two, biases too."""

from dataclasses import replace

from onnx import TensorProto

from qtrace.onnxfile.contracts.rules import biases, files, parameters, placement, types, weights
from qtrace.onnxfile.contracts.targets.ryzenai import CONTRACT as _A8W8

_RYZEN = "Ryzen AI Software documentation, Model Quantization"
_QUARK = "AMD Quark documentation, Quark for ONNX"
_ONNX = "ONNX operators, QuantizeLinear and DequantizeLinear"

CONTRACT = replace(
    _A8W8,
    name="ryzenai_xint8",
    title="Ryzen AI, XINT8",
    rules=(
        files.no_integer_ops(_RYZEN),
        files.no_other_domains(_RYZEN),
        parameters.matching_lengths(_ONNX),
        parameters.constant_scales(_RYZEN),
        parameters.positive_scales(_ONNX),
        parameters.fitting_scales(_ONNX),
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
