"""ONNX for the functions of ``qtrace.graph.functions``: one node where opset 13 has one, else its pieces."""

from __future__ import annotations

import math

import numpy as np

from qtrace.export.onnx.norms import write_square
from qtrace.export.onnx.types import Emitter, operand, unary
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.ops import OpCall

__all__ = ["COMPOSITES"]


def _gelu_tanh(w: OnnxWriter, call: OpCall) -> None:
    """Writes 0.5 * x * (1 + tanh(x * sqrt(2 / pi) * (1 + 0.044715 * x * x)))."""
    x, base = w.name(call.inputs[0]), call.out.name
    square = w.node("Mul", [x, x], w.fresh(base))
    cubic = w.node("Mul", [square, w.scalar(0.044715)], w.fresh(base))
    factor = w.node("Mul", [w.node("Add", [cubic, w.scalar(1.0)], w.fresh(base)), x], w.fresh(base))
    inner = w.node("Mul", [factor, w.scalar(math.sqrt(2.0 / math.pi))], w.fresh(base))
    gate = w.node("Add", [w.node("Tanh", [inner], w.fresh(base)), w.scalar(1.0)], w.fresh(base))
    w.emit("Mul", [w.node("Mul", [x, w.scalar(0.5)], w.fresh(base)), gate], call.out)


def _mish(w: OnnxWriter, call: OpCall) -> None:
    x, base = w.name(call.inputs[0]), call.out.name
    gate = w.node("Tanh", [w.node("Softplus", [x], w.fresh(base))], w.fresh(base))
    w.emit("Mul", [x, gate], call.out)


def _rms_norm(w: OnnxWriter, call: OpCall) -> None:
    a, x, base = call.attrs, w.name(call.inputs[0]), call.out.name
    square = write_square(w, x, [a["axis"]], len(call.inputs[0].shape), base)
    mean = w.node("ReduceMean", [square], w.fresh(base), axes=[a["axis"]], keepdims=1)
    spread = w.node("Sqrt", [w.node("Add", [mean, w.scalar(a["eps"])], w.fresh(base))], w.fresh(base))
    if a["weight"] is None:
        w.emit("Div", [x, spread], call.out)
        return
    standardized = w.node("Div", [x, spread], w.fresh(base))
    w.emit("Mul", [standardized, operand(w, a["weight"], np.float32)], call.out)


def _scale_and_shift(w: OnnxWriter, call: OpCall) -> None:
    scale, shift = (operand(w, call.attrs[n], np.float32) for n in ("scale", "shift"))
    product = w.node("Mul", [w.name(call.inputs[0]), scale], w.fresh(call.out.name))
    w.emit("Add", [product, shift], call.out)


def _attention(w: OnnxWriter, call: OpCall) -> None:
    query, key, value = call.inputs[:3]
    base, rank = call.out.name, len(key.shape)
    order = [*range(rank - 2), rank - 1, rank - 2]
    turned = w.node("Transpose", [w.name(key)], w.fresh(base), perm=order)
    scores = w.node("MatMul", [w.name(query), turned], w.fresh(base))
    if call.attrs["scale"] != 1.0:
        scores = w.node("Mul", [scores, w.scalar(call.attrs["scale"])], w.fresh(base))
    mask, bias = call.attrs["mask"], call.attrs["bias"]
    if bias is not None:
        scores = w.node("Add", [scores, operand(w, bias, np.float32)], w.fresh(base))
    if mask is not None and len(mask.shape) > rank:
        sizes = [*(int(n) for n in query.shape[1:-1]), int(key.shape[-2])]
        split = w.node("Reshape", [scores, w.ints([-1, int(mask.shape[1]), *sizes])], w.fresh(base))
        masked = w.node("Add", [split, operand(w, mask, np.float32)], w.fresh(base))
        scores = w.node("Reshape", [masked, w.ints([-1, *sizes])], w.fresh(base))
    elif mask is not None:
        scores = w.node("Add", [scores, operand(w, mask, np.float32)], w.fresh(base))
    weights = w.node("Softmax", [scores], w.fresh(base), axis=-1)
    w.emit("MatMul", [weights, w.name(value)], call.out)


def _channel_shuffle(w: OnnxWriter, call: OpCall) -> None:
    shape, groups, base = [int(n) for n in call.out.shape], call.attrs["groups"], call.out.name
    x = w.name(call.inputs[0])
    split = w.node("Reshape", [x, w.ints([0, groups, shape[1] // groups, -1])], w.fresh(base))
    moved = w.node("Transpose", [split], w.fresh(base), perm=[0, 2, 1, 3])
    w.emit("Reshape", [moved, w.node("Shape", [x], w.fresh(base))], call.out)


def _space_to_depth(w: OnnxWriter, call: OpCall) -> None:
    block, order, x = call.attrs["block"], call.attrs["order"], w.name(call.inputs[0])
    if order == (0, 1, 2):
        w.emit("SpaceToDepth", [x], call.out, blocksize=block)
        return
    base, (_, channels, height, width) = call.out.name, (int(n) for n in call.inputs[0].shape)
    sizes = [0, channels, height // block, block, width // block, block]
    split = w.node("Reshape", [x, w.ints(sizes)], w.fresh(base))
    moved = w.node("Transpose", [split], w.fresh(base), perm=[0, *((3, 5, 1)[i] for i in order), 2, 4])
    target = [0, channels * block * block, height // block, width // block]
    w.emit("Reshape", [moved, w.ints(target)], call.out)


COMPOSITES: dict[str, Emitter] = {
    "erf": unary("Erf"),
    "gelu_tanh": _gelu_tanh,
    "mish": _mish,
    "rms_norm": _rms_norm,
    "scale_and_shift": _scale_and_shift,
    "scaled_dot_product_attention": _attention,
    "channel_shuffle": _channel_shuffle,
    "space_to_depth": _space_to_depth,
}
