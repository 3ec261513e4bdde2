"""AMD's Ryzen AI in A8W8 and A16W8: symmetric integers with float scales."""

from onnx import TensorProto

from qtrace.onnxfile.contracts.base import CPU, Contract
from qtrace.onnxfile.contracts.rules import biases, files, parameters, placement, types, weights

_RYZEN = "Ryzen AI Software documentation, Model Quantization"
_QUARK = "AMD Quark documentation, Quark for ONNX"
_ONNX = "ONNX operators, QuantizeLinear and DequantizeLinear"

_OPS = (
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
        types.native_wide_types(_ONNX),
        parameters.matching_lengths(_ONNX),
        parameters.constant_scales(_RYZEN),
        parameters.positive_scales(_ONNX),
        parameters.fitting_scales(_ONNX),
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
    ops=frozenset(_OPS.split()),
    fused=frozenset({"Relu", "Clip"}),
    rounds_results=frozenset(_OPS.split()),
    floats_run_on=CPU,
)
