"""Qualcomm's QNN on the Hexagon tensor processor, through onnxruntime's execution provider."""

from onnx import TensorProto

from qtrace.onnxfile.contracts.base import Contract
from qtrace.onnxfile.contracts.rules import biases, files, parameters, placement, types, weights

_PROVIDER = "ONNX Runtime documentation, QNN Execution Provider"
_QUANTIZER = "ONNX Runtime, quantization for the QNN Execution Provider"
_ONNX = "ONNX operators, QuantizeLinear and DequantizeLinear"

_OPS = (
    "Conv ConvTranspose Gemm MatMul Add Sub Mul Div Relu Clip LeakyRelu PRelu Sigmoid Tanh HardSwish "
    "HardSigmoid Softmax LayerNormalization AveragePool GlobalAveragePool MaxPool ReduceMean ReduceSum "
    "Concat Resize Min Max BatchNormalization"
)

CONTRACT = Contract(
    name="qnn",
    title="QNN on the Hexagon tensor processor",
    rules=(
        files.no_integer_ops(_PROVIDER),
        types.native_wide_types(_ONNX),
        parameters.matching_lengths(_ONNX),
        parameters.constant_scales(_PROVIDER),
        parameters.positive_scales(_ONNX),
        parameters.fitting_scales(_ONNX),
        weights.weight_axis(_QUANTIZER),
        weights.weights_per_tensor(_QUANTIZER, "MatMul"),
        weights.weight_bits(_QUANTIZER, "MatMul"),
        weights.symmetric_weights(_QUANTIZER, unsigned=True),
        weights.quantized_weights(_PROVIDER, per_tensor=("MatMul", "Gemm")),
        parameters.one_scale_per_activation(_PROVIDER),
        parameters.smallest_range(_QUANTIZER, 1e-4),
        placement.fixed_outputs(
            _QUANTIZER, "Sigmoid", {TensorProto.UINT16: (1 / 65536, 0), TensorProto.INT16: (1 / 32768, 0)}
        ),
        placement.fixed_outputs(
            _QUANTIZER, "Tanh", {TensorProto.UINT16: (1 / 32768, 32768), TensorProto.INT16: (1 / 32768, 0)}
        ),
        biases.norm_biases(_QUANTIZER),
        biases.int32_biases(_QUANTIZER),
        biases.accumulator_biases(_QUANTIZER),
        placement.both_inputs_quantized(_PROVIDER, "Add", "Sub", "Mul", "Div"),
        placement.equal_types(_PROVIDER, "Add", "Sub", "Mul", "Div"),
        placement.equal_widths(_QUANTIZER),
    ),
    ops=frozenset(_OPS.split()),
    fused=frozenset({"Relu", "Clip"}),
    rounds_results=frozenset(_OPS.split()),
)
