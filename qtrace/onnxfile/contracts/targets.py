"""The contracts, by target: what it computes, and the rules of its documentation."""

from __future__ import annotations

from dataclasses import replace

from onnx import TensorProto

from qtrace.errors import ExportError
from qtrace.onnxfile.contracts.base import CPU, Contract, ContractRule
from qtrace.onnxfile.contracts.rules import biases, files, parameters, placement, types, weights
from qtrace.plugins import ObjectPlugins

__all__ = ["get", "known"]

_ONNX = "ONNX operators, QuantizeLinear and DequantizeLinear"


def _scales(standard: str, device: str) -> tuple[ContractRule, ...]:
    """Returns the rules on scales that every target has, with the documents that they come from."""
    return (
        parameters.matching_lengths(standard),
        parameters.constant_scales(device),
        parameters.positive_scales(standard),
        parameters.fitting_scales(standard),
    )


# onnxruntime on CPU.
_QUANTIZE = "ONNX Runtime documentation, Quantize ONNX Models"

_ONNXRUNTIME_OPS = (
    "Conv Gemm MatMul Add Mul Concat AveragePool GlobalAveragePool MaxPool Sigmoid LeakyRelu Softmax Resize "
    "Where Relu Clip"
)
_ORT_TYPES = (TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16, TensorProto.UINT4)

_ONNXRUNTIME = Contract(
    name="onnxruntime",
    title="onnxruntime on CPU",
    rules=(
        types.native_wide_types(_ONNX),
        *_scales(_ONNX, _QUANTIZE),
        types.activation_types(_ONNX, *_ORT_TYPES, TensorProto.INT4),
        weights.weight_axis(_QUANTIZE),
        weights.quantized_weights(_QUANTIZE, per_tensor=("MatMul", "Gemm")),
        parameters.one_scale_per_activation(_QUANTIZE),
        biases.accumulator_biases(_QUANTIZE),
    ),
    ops=frozenset(_ONNXRUNTIME_OPS.split()),
    fused=frozenset({"Relu", "Clip"}),
    rounds_results=frozenset(_ONNXRUNTIME_OPS.split()) - {"Gemm", "MatMul"},
    measured=True,
)

# Qualcomm's QNN on the Hexagon tensor processor, through onnxruntime's execution provider.
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

_QNN_CONTRACT = Contract(
    name="qnn",
    title="QNN on the Hexagon tensor processor",
    rules=(
        files.no_integer_ops(_QNN),
        types.native_wide_types(_ONNX),
        *_scales(_ONNX, _QNN),
        weights.weight_axis(_QNN_TOOL),
        weights.weights_per_tensor(_QNN_TOOL, "MatMul"),
        weights.weight_bits(_QNN_TOOL, "MatMul"),
        weights.symmetric_weights(_QNN_TOOL, unsigned=True),
        weights.quantized_weights(_QNN, per_tensor=("MatMul", "Gemm")),
        parameters.one_scale_per_activation(_QNN),
        parameters.smallest_range(_QNN_TOOL, 1e-4),
        placement.fixed_outputs(
            _QNN_TOOL, "Sigmoid", {TensorProto.UINT16: (1 / 65536, 0), TensorProto.INT16: (1 / 32768, 0)}
        ),
        placement.fixed_outputs(
            _QNN_TOOL, "Tanh", {TensorProto.UINT16: (1 / 32768, 32768), TensorProto.INT16: (1 / 32768, 0)}
        ),
        biases.norm_biases(_QNN_TOOL),
        biases.int32_biases(_QNN_TOOL),
        biases.accumulator_biases(_QNN_TOOL),
        placement.both_inputs_quantized(_QNN, "Add", "Sub", "Mul", "Div"),
        placement.equal_types(_QNN, "Add", "Sub", "Mul", "Div"),
        placement.equal_widths(_QNN_TOOL),
    ),
    ops=frozenset(_QNN_OPS.split()),
    fused=frozenset({"Relu", "Clip"}),
    rounds_results=frozenset(_QNN_OPS.split()),
    device_ops=frozenset(_DEVICE_OPS.split()),
    floats_run_on="the device in 16-bit floats, or the CPU",
)

# TensorRT 10 and 11: explicit quantization.
_EXPLICIT = "NVIDIA TensorRT documentation, Explicit Quantization"
_TYPES = "NVIDIA TensorRT documentation, Working with Quantized Types"
_PARSER = "ONNX-TensorRT, Supported ONNX Operators, QuantizeLinear and DequantizeLinear"
_TOOL = "NVIDIA TensorRT Model Optimizer, ONNX post-training quantization"

_TENSORRT_OPS = (
    "Conv ConvTranspose Gemm MatMul Add Mul AveragePool GlobalAveragePool MaxPool BatchNormalization Clip "
    "Concat"
)
_FUSED = "Relu Clip LeakyRelu PRelu Sigmoid HardSigmoid HardSwish Tanh Elu Mish Mul Add BatchNormalization"

_TENSORRT = Contract(
    name="tensorrt",
    title="TensorRT 10 and 11",
    rules=(
        files.lowest_opset(_PARSER, 13),
        files.no_other_domains(_PARSER),
        files.no_integer_ops(_EXPLICIT),
        types.written_zero_points(_PARSER),
        *_scales(_PARSER, _PARSER),
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

# AMD's Ryzen AI in A8W8 and A16W8: symmetric integers with float scales.
_RYZEN = "Ryzen AI Software documentation, Model Quantization"
_QUARK = "AMD Quark documentation, Quark for ONNX"

_RYZENAI_OPS = (
    "Conv ConvTranspose Gemm MatMul Add Sub Mul Div Relu Clip LeakyRelu PRelu Sigmoid Tanh HardSwish "
    "HardSigmoid Softmax LayerNormalization AveragePool GlobalAveragePool MaxPool ReduceMean Concat Resize "
    "BatchNormalization"
)
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div")

_RYZENAI = Contract(
    name="ryzenai",
    title="Ryzen AI, A8W8 and A16W8",
    rules=(
        files.no_integer_ops(_RYZEN),
        types.native_wide_types(_ONNX),
        *_scales(_ONNX, _RYZEN),
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
_RYZENAI_XINT8 = replace(
    _RYZENAI,
    name="ryzenai_xint8",
    title="Ryzen AI, XINT8",
    rules=(
        files.no_integer_ops(_RYZEN),
        files.no_other_domains(_RYZEN),
        *_scales(_ONNX, _RYZEN),
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

_OWN = {own.name: own for own in (_ONNXRUNTIME, _QNN_CONTRACT, _TENSORRT, _RYZENAI, _RYZENAI_XINT8)}


class _Contracts(ObjectPlugins[Contract]):
    def packaged(self) -> tuple[str, ...]:
        """Lists the targets of the contracts here, sorted."""
        return tuple(sorted(_OWN))

    def get(self, name: str) -> Contract:
        """Returns the contract of a target."""
        return _OWN[name] if name in _OWN else super().get(name)


_CONTRACTS = _Contracts(__name__, "qtrace.contracts", Contract, ExportError)
known, get = _CONTRACTS.known, _CONTRACTS.get
