"""What Qualcomm's QNN on the Hexagon tensor processor expects, through onnxruntime's execution provider."""

from __future__ import annotations

from onnx import TensorProto

from qtrace.extras.contracts import graph_rules, quantizer_rules, tensor_rules
from qtrace.extras.contracts.base import Contract

_QNN = "ONNX Runtime documentation, QNN Execution Provider"
_QNN_TOOL = "ONNX Runtime, quantization for the QNN Execution Provider"

_QNN_OPS = (
    "Conv ConvTranspose Gemm MatMul Add Sub Mul Div Relu Clip LeakyRelu PRelu Sigmoid Tanh HardSwish "
    "HardSigmoid Softmax LayerNormalization AveragePool GlobalAveragePool MaxPool ReduceMean ReduceSum "
    "Concat Resize Min Max BatchNormalization"
)

# The list of the provider's documentation (2.7), and Erf as a part of Gelu: all else runs on the CPU.
_DEVICE_OPS = (
    "Abs Add And ArgMax ArgMin Asin Atan AveragePool BatchNormalization Cast CastLike Ceil Clip Concat Conv "
    "ConvTranspose Cos CumSum DepthToSpace Div Einsum Elu Equal Erf Exp Expand Flatten Floor FusedMatMul "
    "GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual "
    "GridSample GroupNormalization HardSigmoid HardSwish Identity If InstanceNormalization Inverse IsNaN LRN "
    "LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax LpNormalization LpPool MatMul "
    "MatMulNBits Max MaxPool Mean Min Mod Mul Neg NonMaxSuppression NonZero Not OneHot Or PRelu Pad Pow "
    "QuickGelu RMSNormalization RandomNormalLike RandomUniformLike Range Reciprocal ReduceL2 ReduceLogSumExp "
    "ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Relu Reshape Resize RoiAlign RotaryEmbedding Round "
    "STFT ScatterElements ScatterND Selu Shape Sigmoid Sign SimplifiedLayerNormalization Sin Slice Softmax "
    "Softplus SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK Transpose Unsqueeze "
    "Upsample Where Xor"
)

CONTRACT = Contract(
    name="qnn",
    title="QNN on the Hexagon tensor processor",
    rules=(
        graph_rules.no_integer_ops(_QNN),
        quantizer_rules.native_wide_types(quantizer_rules.ONNX_OPERATORS),
        *quantizer_rules.scale_rules(quantizer_rules.ONNX_OPERATORS, _QNN),
        tensor_rules.weight_axis(_QNN_TOOL),
        tensor_rules.weights_per_tensor(_QNN_TOOL, "MatMul"),
        tensor_rules.weight_bits(_QNN_TOOL, "MatMul"),
        tensor_rules.symmetric_weights(_QNN_TOOL, unsigned=True),
        tensor_rules.quantized_weights(_QNN, per_tensor=("MatMul", "Gemm")),
        quantizer_rules.one_scale_per_activation(_QNN),
        quantizer_rules.smallest_range(_QNN_TOOL, 1e-4),
        graph_rules.fixed_outputs(
            _QNN_TOOL, "Sigmoid", {TensorProto.UINT16: (1 / 65536, 0), TensorProto.INT16: (1 / 32768, 0)}
        ),
        graph_rules.fixed_outputs(
            _QNN_TOOL, "Tanh", {TensorProto.UINT16: (1 / 32768, 32768), TensorProto.INT16: (1 / 32768, 0)}
        ),
        tensor_rules.norm_biases(_QNN_TOOL),
        tensor_rules.int32_biases(_QNN_TOOL),
        tensor_rules.accumulator_biases(_QNN_TOOL),
        graph_rules.both_inputs_quantized(_QNN, "Add", "Sub", "Mul", "Div"),
        graph_rules.equal_types(_QNN, "Add", "Sub", "Mul", "Div"),
        graph_rules.equal_widths(_QNN_TOOL),
    ),
    ops=frozenset(_QNN_OPS.split()),
    fused=frozenset({"Relu", "Clip"}),
    rounds_results=frozenset(_QNN_OPS.split()),
    device_ops=frozenset(_DEVICE_OPS.split()),
    floats_run_on="the device in 16-bit floats, or the CPU",
)
