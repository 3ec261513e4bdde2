"""onnxruntime on CPU."""

from onnx import TensorProto

from qtrace.onnxfile.contracts.base import Contract
from qtrace.onnxfile.contracts.rules import biases, parameters, types, weights

_QUANTIZE = "ONNX Runtime documentation, Quantize ONNX Models"
_ONNX = "ONNX operators, QuantizeLinear and DequantizeLinear"

_OPS = (
    "Conv Gemm MatMul Add Mul Concat AveragePool GlobalAveragePool MaxPool Sigmoid LeakyRelu Softmax Resize "
    "Where Relu Clip"
)
_TYPES = (TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16, TensorProto.UINT4)

CONTRACT = Contract(
    name="onnxruntime",
    title="onnxruntime on CPU",
    rules=(
        types.native_wide_types(_ONNX),
        parameters.matching_lengths(_ONNX),
        parameters.constant_scales(_QUANTIZE),
        parameters.positive_scales(_ONNX),
        parameters.fitting_scales(_ONNX),
        types.activation_types(_ONNX, *_TYPES, TensorProto.INT4),
        weights.weight_axis(_QUANTIZE),
        weights.quantized_weights(_QUANTIZE, per_tensor=("MatMul", "Gemm")),
        parameters.one_scale_per_activation(_QUANTIZE),
        biases.accumulator_biases(_QUANTIZE),
    ),
    ops=frozenset(_OPS.split()),
    fused=frozenset({"Relu", "Clip"}),
    rounds_results=frozenset(_OPS.split()) - {"Gemm", "MatMul"},
    measured=True,
)
