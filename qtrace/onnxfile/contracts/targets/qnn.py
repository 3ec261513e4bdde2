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
    device_ops=frozenset(_DEVICE_OPS.split()),
    floats_run_on="the device in 16-bit floats, or the CPU",
)
