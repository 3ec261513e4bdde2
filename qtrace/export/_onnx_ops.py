"""ONNX for each op kind. An emitter reads an `OpCall` and writes the nodes that compute its output."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.export._onnx_arithmetic import ARITHMETIC
from qtrace.export._onnx_index import INDEXING
from qtrace.export._onnx_norms import NORMS
from qtrace.export._onnx_reductions import REDUCTIONS
from qtrace.export._onnx_shapes import SHAPES
from qtrace.export._onnx_types import Emitter, operand
from qtrace.export._onnx_writer import OnnxWriter
from qtrace.graph.walk import users
from qtrace.ops import OpCall

__all__ = ["EMITTERS", "Emitter", "weight_layout"]


def weight_layout(call: OpCall, weight: np.ndarray) -> tuple[np.ndarray, int]:
    """A layer's weight in ONNX's layout, and the axis that counts its output channels there."""
    if call.kind == "conv2d":
        return weight.reshape(-1, *weight.shape[-3:]), 0
    if call.kind == "conv_transpose2d":
        return weight.reshape(-1, *weight.shape[-3:]), 1
    if call.kind == "linear" and not _only_matrices(call):
        return weight.T, 1
    return weight, 0


def _only_matrices(call: OpCall) -> bool:
    """Whether every linear layer that reads this weight has a matrix as its input: Gemm takes only those."""
    assert call.weight is not None
    calls = [found for user in users(call.weight) if (found := ops.read(user)) is not None]
    return all(len(c.inputs[0].shape) == 2 for c in calls if c.kind == "linear")


def _weight(w: OnnxWriter, call: OpCall) -> str:
    """The tensor of a layer's weight in ONNX's layout, be it stored integers, floats or computed."""
    node = call.weight
    assert node is not None
    value = w.value(node)
    if value is not None:  # a layer that stays in float
        laid = weight_layout(call, value)[0]
        same = laid.shape == value.shape and np.array_equal(laid, value)
        return w.name(node) if same else w.constant(f"{node.name}_{call.kind}", laid)
    if id(node) in w.laid:
        return w.name(node)
    shape = [int(n) for n in node.shape]
    if len(shape) == 5:
        return w.node("Reshape", [w.name(node), w.ints([-1, *shape[2:]])], w.fresh(node.name))
    if call.kind == "linear" and not _only_matrices(call):
        return w.node("Transpose", [w.name(node)], w.fresh(node.name), perm=[1, 0])
    return w.name(node)


def _conv(w: OnnxWriter, call: OpCall) -> None:
    a = call.attrs
    (ph, pw), weight = a["padding"], call.weight
    assert weight is not None
    attributes: dict[str, Any] = {
        "kernel_shape": [int(n) for n in weight.shape[-2:]],
        "strides": list(a["stride"]),
        "dilations": list(a["dilation"]),
        "group": a["groups"],
        "pads": [ph, pw, ph, pw],
    }
    op = "Conv"
    if call.kind == "conv_transpose2d":
        op, attributes["output_padding"] = "ConvTranspose", list(a["output_padding"])
    inputs = [w.name(call.inputs[0]), _weight(w, call)]
    w.emit(op, inputs if call.bias is None else [*inputs, w.name(call.bias)], call.out, **attributes)


def _linear(w: OnnxWriter, call: OpCall) -> None:
    x = call.inputs[0]
    inputs = [w.name(x), _weight(w, call)]
    if len(x.shape) == 2:
        if call.bias is not None:
            inputs.append(w.name(call.bias))
        w.emit("Gemm", inputs, call.out, transB=int(_only_matrices(call)))
    elif call.bias is None:
        w.emit("MatMul", inputs, call.out)
    else:
        product = w.node("MatMul", inputs, w.fresh(call.out.name))
        w.emit("Add", [product, w.name(call.bias)], call.out)


def _matmul(w: OnnxWriter, call: OpCall) -> None:
    names = []
    for node, flip in zip(call.inputs, (call.attrs["transpose_a"], call.attrs["transpose_b"]), strict=True):
        name = w.name(node)
        if flip:
            rank = len(node.shape)
            order = [*range(rank - 2), rank - 1, rank - 2]
            name = w.node("Transpose", [name], w.fresh(node.name), perm=order)
        names.append(name)
    w.emit("MatMul", names, call.out)


def _unary(op: str, **fixed: Any) -> Emitter:
    def emit(w: OnnxWriter, call: OpCall) -> None:
        w.emit(op, [w.name(call.inputs[0])], call.out, **fixed)

    return emit


def _leaky_relu(w: OnnxWriter, call: OpCall) -> None:
    w.emit("LeakyRelu", [w.name(call.inputs[0])], call.out, alpha=call.attrs["negative_slope"])


def _clip(w: OnnxWriter, call: OpCall) -> None:
    bounds = (0.0, 6.0) if call.kind == "relu6" else (call.attrs["lower"], call.attrs["upper"])
    names = ["" if b is None else w.scalar(b) for b in bounds]
    w.emit("Clip", [w.name(call.inputs[0]), *names], call.out)


def _gated(gate: str, **fixed: Any) -> Emitter:
    """x * gate(x)."""

    def emit(w: OnnxWriter, call: OpCall) -> None:
        x = w.name(call.inputs[0])
        w.emit("Mul", [x, w.node(gate, [x], w.fresh(call.out.name), **fixed)], call.out)

    return emit


def _pool(op: str) -> Emitter:
    def emit(w: OnnxWriter, call: OpCall) -> None:
        a = call.attrs
        ph, pw = a["padding"]
        extra = {"count_include_pad": int(a["count_include_pad"])} if op == "AveragePool" else {}
        window = {"kernel_shape": list(a["kernel"]), "strides": list(a["stride"]), "pads": [ph, pw, ph, pw]}
        w.emit(op, [w.name(call.inputs[0])], call.out, **window, **extra)

    return emit


def _adaptive(everything: str, window: str) -> Emitter:
    def emit(w: OnnxWriter, call: OpCall) -> None:
        size, shape = call.attrs["output_size"], call.inputs[0].shape[-2:]
        x = [w.name(call.inputs[0])]
        if size == (1, 1):
            w.emit(everything, x, call.out)
            return
        if any(n % s for n, s in zip(shape, size, strict=True)):
            raise ExportError(
                f"{call.out.name}: adaptive pooling of {tuple(shape)} to {size} has windows of unequal size, "
                "which ONNX cannot express: use a size that divides the input"
            )
        kernel = [int(n // s) for n, s in zip(shape, size, strict=True)]
        w.emit(window, x, call.out, kernel_shape=kernel, strides=kernel)

    return emit


def _join(w: OnnxWriter, call: OpCall) -> None:
    axis, out = call.attrs["axis"], call.out
    names = [operand(w, n, out.dtype) for n in call.attrs["parts"]]
    if call.kind == "stack":
        names = [w.node("Unsqueeze", [n, w.ints([axis])], w.fresh(n)) for n in names]
    else:  # MegEngine joins numbers without axes as vectors
        parts = zip(names, call.attrs["parts"], strict=True)
        names = [n if np.shape(p) else w.node("Reshape", [n, w.ints([1])], w.fresh(n)) for n, p in parts]
    w.emit("Concat", names, out, axis=axis)


def _prelu(w: OnnxWriter, call: OpCall) -> None:
    """One slope, or one for each channel along axis 1; ONNX aligns the last axes."""
    slope, x = call.attrs["slope"], call.inputs[0]
    name = operand(w, slope, np.float32)
    size = int(np.prod(slope.shape))
    if size > 1 and len(slope.shape) == 1:
        name = w.node("Reshape", [name, w.ints([size, *[1] * (len(x.shape) - 2)])], w.fresh(call.out.name))
    w.emit("PRelu", [w.name(x), name], call.out)


def _interpolate(w: OnnxWriter, call: OpCall) -> None:
    a, shape, out = call.attrs, call.inputs[0].shape, call.out.shape
    scales = [1.0, 1.0, *(float(o) / float(i) for o, i in zip(out[-2:], shape[-2:], strict=True))]
    if a["mode"] == "nearest":
        how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    elif a["mode"] == "bilinear":
        corners = "align_corners" if a["align_corners"] else "half_pixel"
        how = {"mode": "linear", "coordinate_transformation_mode": corners}
    else:
        raise ExportError(f"{call.out.name}: interpolate mode {a['mode']!r} has no ONNX form")
    factors = w.constant(f"{call.out.name}_scales", np.array(scales, np.float32))
    w.emit("Resize", [w.name(call.inputs[0]), "", factors], call.out, **how)


_SIXTH = {"alpha": 1.0 / 6.0, "beta": 0.5}

EMITTERS: dict[str, Emitter] = {
    **ARITHMETIC,
    **NORMS,
    **REDUCTIONS,
    **INDEXING,
    **SHAPES,
    "conv2d": _conv,
    "conv_transpose2d": _conv,
    "linear": _linear,
    "matmul": _matmul,
    "relu": _unary("Relu"),
    "relu6": _clip,
    "clip": _clip,
    "leaky_relu": _leaky_relu,
    "prelu": _prelu,
    "sigmoid": _unary("Sigmoid"),
    "tanh": _unary("Tanh"),
    "hsigmoid": _unary("HardSigmoid", **_SIXTH),
    "silu": _gated("Sigmoid"),
    "hswish": _gated("HardSigmoid", **_SIXTH),
    "max_pool2d": _pool("MaxPool"),
    "avg_pool2d": _pool("AveragePool"),
    "adaptive_avg_pool2d": _adaptive("GlobalAveragePool", "AveragePool"),
    "adaptive_max_pool2d": _adaptive("GlobalMaxPool", "MaxPool"),
    "concat": _join,
    "stack": _join,
    "interpolate": _interpolate,
}
