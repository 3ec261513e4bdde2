"""Times the ops of a cost table in LiteRT, with the kernels that it chooses by default.

An export has some ops in another form than is timed here. A padding before a stride is a PAD of its own,
an inner product on integers has a scale for each channel. An average pooling with a stride on integers is a
depthwise convolution, a pooling of a whole image in float an AVERAGE_POOL_2D, and a slice a STRIDED_SLICE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.kernels.copies import PASSES, Run, least_time, measure_copies
from benchmarks.kernels.grid_small import small_grid
from benchmarks.kernels.litert_net import LiteNet
from qtrace.costs import FLOAT, INTEGER, LOOKUP, Measurement, OpShape
from qtrace.targets.tflite.writer import FileTensor, Inputs

__all__ = ["grid", "measure", "open_network"]

_SAME, _VALID = 0, 1
_RELU = 1
_BINARY = {
    "add": ("ADD", "AddOptions"),
    "mul": ("MUL", "MulOptions"),
    "sub": ("SUB", "SubOptions"),
    "div": ("DIV", "DivOptions"),
}
# Function -> operator and options. Several are look-ups on integers.
_UNARY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "relu": ("RELU", "", {}),
    "clip": ("RELU6", "", {}),
    "leaky_relu": ("LEAKY_RELU", "LeakyReluOptions", {"alpha": 0.1}),
    "sigmoid": ("LOGISTIC", "", {}),
    "tanh": ("TANH", "", {}),
    "hswish": ("HARD_SWISH", "", {}),
    "exp": ("EXP", "ExpOptions", {}),
}
_LOOKUPS = ("leaky_relu", "sigmoid", "tanh", "hswish", "exp")
_FLOAT_ONLY = ("div",)

Shape = tuple[int, ...]


def grid() -> list[tuple[OpShape, str]]:
    """Returns the ops and forms that LiteRT may have."""
    pairs = [(op, LOOKUP if form == INTEGER and op.kind in _LOOKUPS else form) for op, form in small_grid()]
    return [(op, form) for op, form in pairs if form == FLOAT or op.kind not in _FLOAT_ONLY]


def measure(progress: Callable[[int, int], None]) -> tuple[list[Measurement], float]:
    """Returns the times of the ops, and the time that a run takes besides its ops."""
    pairs = grid()
    measurements = measure_copies(pairs, open_network, progress=lambda: progress(1, PASSES * len(pairs)))
    tiny = OpShape("reshape", ((1, 1, 1, 1),), ((1, 1),))
    run = open_network(tiny, FLOAT, 1)
    return measurements, 0.0 if run is None else least_time(run)


def open_network(op: OpShape, form: str, copies: int) -> Run | None:
    """Loads a network of ``copies`` of an op; None if LiteRT does not have the form."""
    from ai_edge_litert.interpreter import Interpreter

    model = _write(op, form, copies)
    if model is None:
        return None
    try:
        loaded = Interpreter(model_content=model, num_threads=1)
        loaded.allocate_tensors()
    except (RuntimeError, ValueError):  # no kernel
        return None
    random = np.random.default_rng(0)
    for detail in loaded.get_input_details():
        shape, kind = tuple(detail["shape"]), np.dtype(detail["dtype"])
        floats = random.normal(size=shape).astype(np.float32)
        integers = random.integers(-100, 100, shape).astype(np.int8)
        loaded.set_tensor(detail["index"], floats if kind == np.float32 else integers)
    run: Run = loaded.invoke
    return run


def _write(op: OpShape, form: str, copies: int) -> bytes | None:
    net, integer = LiteNet(), form != FLOAT or op.kind == "dequantize"
    data = op.inputs[:1] if op.stored else op.inputs
    sources = [net.input(_last(shape), integer) for shape in data]
    outputs = []
    for _ in range(copies):
        output = _op(net, op, sources, integer)
        if output is None:
            return None
        outputs.append(output)
    return net.serialize(outputs)


def _last(shape: Shape) -> Shape:
    """Returns the shape with the channels last."""
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape


def _op(net: LiteNet, op: OpShape, sources: list[FileTensor], integer: bool) -> FileTensor | None:
    """Adds an op; returns None for one that LiteRT cannot express."""
    kind = op.kind
    if kind in ("quantize", "dequantize"):
        output = net.tensor(_last(op.outputs[0]), kind == "quantize")
        return net.op(kind.upper(), sources, output)
    if kind in _UNARY:
        return _unary(net, op, sources, integer)
    if kind in _BINARY:
        code, options = _BINARY[kind]
        other = [net.stored(_last(op.inputs[1]), integer)] if op.stored else []
        return net.op(code, [*sources, *other], net.tensor(_last(op.outputs[0]), integer), options)
    if kind == "conv2d":
        return _conv(net, op, sources, integer)
    if kind in ("silu", "hsigmoid"):
        return _gate(net, op, sources, integer)
    return _other(net, op, sources, integer)


def _unary(net: LiteNet, op: OpShape, sources: list[FileTensor], integer: bool) -> FileTensor:
    code, options, values = _UNARY[op.kind]
    scale, zero = {"sigmoid": (1 / 256, -128), "tanh": (1 / 128, 0)}.get(op.kind, (0.05, 0))
    output = net.tensor(_last(op.outputs[0]), integer, scale, zero)
    return net.op(code, sources, output, options, **values)


def _gate(net: LiteNet, op: OpShape, sources: list[FileTensor], integer: bool) -> FileTensor | None:
    """Adds x * sigmoid(x), which lacks an operator of its own."""
    if op.kind != "silu" or integer:  # on integers qtrace writes it as one look-up of another kind
        return None
    shape = _last(op.outputs[0])
    gate = net.op("LOGISTIC", sources, net.tensor(shape, False))
    return net.op("MUL", [*sources, gate], net.tensor(shape, False), "MulOptions")


def _conv(net: LiteNet, op: OpShape, sources: list[FileTensor], integer: bool) -> FileTensor:
    outputs, inputs, height, width = op.weight
    output = net.tensor(_last(op.outputs[0]), integer, zero=-128)
    bias = net.bias(outputs, integer)
    options = {**_steps(op, _SAME), "fusedActivationFunction": _RELU}
    options.update(dilationHFactor=1, dilationWFactor=1)
    if op.groups > 1:
        weight = net.weight((1, height, width, outputs), integer, axis=3)
        options.update(depthMultiplier=1)
        return net.op(
            "DEPTHWISE_CONV_2D", [*sources, weight, bias], output, "DepthwiseConv2DOptions", **options
        )
    weight = net.weight((outputs, height, width, inputs), integer)
    return net.op("CONV_2D", [*sources, weight, bias], output, "Conv2DOptions", **options)


def _steps(op: OpShape, padding: int) -> dict[str, int]:
    return {"padding": padding, "strideH": op.stride[0], "strideW": op.stride[1]}


def _other(net: LiteNet, op: OpShape, sources: list[FileTensor], integer: bool) -> FileTensor | None:
    shape, kind = _last(op.outputs[0]), op.kind
    if kind == "softmax":
        output = net.tensor(shape, integer, 1 / 256, -128)
        return net.op("SOFTMAX", sources, output, "SoftmaxOptions", beta=1.0)
    inputs: Inputs
    output = net.tensor(shape, integer)
    if kind == "linear":
        weight = net.weight(op.weight, integer, per_channel=False)
        bias = net.bias(op.weight[0], integer, per_channel=False)
        return net.op("FULLY_CONNECTED", [*sources, weight, bias], output, "FullyConnectedOptions")
    if kind == "matmul":
        return net.op("BATCH_MATMUL", sources, output, "BatchMatMulOptions")
    if kind in ("max_pool2d", "avg_pool2d"):
        window = {"filterHeight": op.weight[0], "filterWidth": op.weight[1], **_steps(op, _SAME)}
        code = "MAX_POOL_2D" if kind == "max_pool2d" else "AVERAGE_POOL_2D"
        return net.op(code, sources, output, "Pool2DOptions", **window)
    if kind in ("mean", "adaptive_avg_pool2d"):
        inputs = [*sources, (1, 2)]
        return net.op("MEAN", inputs, output, "ReducerOptions", keepDims=True)
    if kind == "concat":
        return net.op("CONCATENATION", sources, output, "ConcatenationOptions", axis=3)
    if kind == "reshape":
        inputs = [*sources, shape]
        return net.op("RESHAPE", inputs, output, "ReshapeOptions", newShape=np.array(shape, np.int32))
    if kind == "transpose":
        sizes = op.inputs[0]
        output = net.tensor(sizes, integer)  # the channels move to the front
        return net.op("TRANSPOSE", [*sources, (0, 3, 1, 2)], output, "TransposeOptions")
    if kind == "split":
        places = [(0,) * 4, shape]
        return net.op("SLICE", [*sources, *places], output, "SliceOptions")
    if kind.startswith("interpolate"):
        code, name = (
            ("RESIZE_BILINEAR", "Bilinear")
            if "bilinear" in kind
            else ("RESIZE_NEAREST_NEIGHBOR", "NearestNeighbor")
        )
        options = {"halfPixelCenters": "bilinear" in kind}
        inputs = [*sources, shape[1:3]]
        return net.op(code, inputs, output, f"Resize{name}Options", **options)
    if kind == "conv_transpose2d":
        depth, channels, rows, columns = op.weight
        weight = net.weight((channels, rows, columns, depth), integer)
        window = _steps(op, _VALID)
        return net.op("TRANSPOSE_CONV", [shape, weight, *sources], output, "TransposeConvOptions", **window)
    return None
