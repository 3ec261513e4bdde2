"""ONNX for normalizations and for activation functions that stay float, most of them as several nodes.

Finds ops that onnxruntime's integer kernels compute wrong, so that the file keeps them in float.

ONNX for hard sigmoid and hard swish: a ``HardSigmoid`` node, or its pieces for a target without a kernel.

OpenVINO computes ``HardSigmoid`` by a reference, value by value in the plain layout, with a change of layout
before and after it. From ``clip(x + 3, 0, 6) / 6`` it makes an operation of its own, which becomes part of
the convolution before it, also where it is multiplied by ``x``. Other slopes join the ops next to them.

ONNX for the functions of ``qtrace.graph.functions``: one node where opset 13 has one, else its pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.converted import GATE, ConvertedGraph
from qtrace.export.onnx.opset import OPSETS
from qtrace.export.onnx.writer import Emitter, OnnxWriter, array, axes_of, operand, parameter_source, unary
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import get_module, owner
from qtrace.ops import OpCall, Role


def _batch_norm(w: OnnxWriter, call: OpCall) -> None:
    module, names = owner(call.expr), ("weight", "bias", "running_mean", "running_var")
    if module is not None:
        parameters = [get_module(module, n) for n in names]
        values = [None if t is None else t.numpy() for t in parameters]
    else:
        values = [None if call.attrs[n] is None else w.value(call.attrs[n]) for n in names]
        if any(v is None and call.attrs[n] is not None for v, n in zip(values, names, strict=True)):
            raise ExportError(
                f"{call.out.name}: a BatchNorm whose statistics are computed cannot become ONNX: "
                "end the graph before it"
            )
    size = next(v.size for v in values if v is not None)
    defaults = (1.0, 0.0, 0.0, 1.0)
    flat = [
        np.full(size, d, np.float32) if v is None else v.reshape(-1)
        for v, d in zip(values, defaults, strict=True)
    ]
    inputs = [
        w.constant(f"{call.out.name}_{n}", stored)
        if value is None
        else w.parameter(parameter_source(call, n), f"{call.out.name}_{n}", stored)
        for n, value, stored in zip(names, values, flat, strict=True)
    ]
    w.emit("BatchNormalization", [w.name(call.inputs[0]), *inputs], call.out, epsilon=call.attrs["eps"])


def _softmax(w: OnnxWriter, call: OpCall) -> None:
    axes, x = call.attrs["axis"], call.inputs[0]
    if len(axes) == 1:
        w.emit("Softmax", [w.name(x)], call.out, axis=axes[0])
        return
    _, powers, total = _powers(w, call)
    w.emit("Div", [powers, total], call.out)


def _powers(w: OnnxWriter, call: OpCall) -> tuple[str, str, str]:
    """Writes the largest values over the axes, the powers of e of all values less these, and their sum."""
    axes, x, base = axes_of(call), w.name(call.inputs[0]), call.out.name
    top = w.node("ReduceMax", [x], w.fresh(base), axes=axes, keepdims=1)
    largest = float(np.finfo(np.float32).max)  # infinities less infinities are NaN
    top = w.node("Clip", [top, w.scalar(-largest), w.scalar(largest)], w.fresh(base))
    powers = w.node("Exp", [w.node("Sub", [x, top], w.fresh(base))], w.fresh(base))
    return top, powers, w.node("ReduceSum", [powers, w.ints(axes)], w.fresh(base), keepdims=1)


def _log_sum(w: OnnxWriter, call: OpCall, output: str) -> str:
    """Writes the logarithm of the sum of the powers of e, with the axes kept.

    OpenVINO reads ReduceLogSumExp without its axes before opset 18, and onnxruntime takes 2 to 4 times as
    long for it.
    """
    top, _, total = _powers(w, call)
    return w.node("Add", [w.node("Log", [total], w.fresh(call.out.name)), top], output)


def _logsoftmax(w: OnnxWriter, call: OpCall) -> None:
    axes, x = axes_of(call), w.name(call.inputs[0])
    if len(axes) == 1:
        w.emit("LogSoftmax", [x], call.out, axis=axes[0])
        return
    w.emit("Sub", [x, _log_sum(w, call, w.fresh(call.out.name))], call.out)


def _logsumexp(w: OnnxWriter, call: OpCall) -> None:
    if call.attrs["keepdims"]:
        w.names[call.out] = _log_sum(w, call, call.out.name)
    else:
        total = _log_sum(w, call, w.fresh(call.out.name))
        w.emit("Squeeze", [total, w.ints(axes_of(call))], call.out)


def _power_sum(w: OnnxWriter, call: OpCall, keep: int, output: str) -> str:
    """Writes the vector norm over the axes."""
    order = 2.0 if call.attrs["ord"] is None else float(call.attrs["ord"])
    axes, x, base = axes_of(call), w.name(call.inputs[0]), call.out.name
    if order == 2.0:
        return w.node("ReduceL2", [x], output, axes=axes, keepdims=keep)
    if order <= 0.0 or math.isinf(order):
        raise ExportError(f"{base}: a norm of order {order:g} cannot become ONNX: use order 1 or 2")
    sizes = w.node("Abs", [x], w.fresh(base))
    if order == 1.0:  # OpenVINO reads ReduceL1 without its axes before opset 18
        return w.node("ReduceSum", [sizes, w.ints(axes)], output, keepdims=keep)
    powers = w.node("Pow", [sizes, w.scalar(order)], w.fresh(base))
    total = w.node("ReduceSum", [powers, w.ints(axes)], w.fresh(base), keepdims=keep)
    return w.node("Pow", [total, w.scalar(1.0 / order)], output)


def _norm(w: OnnxWriter, call: OpCall) -> None:
    w.names[call.out] = _power_sum(w, call, int(bool(call.attrs["keepdims"])), call.out.name)


def _normalize(w: OnnxWriter, call: OpCall) -> None:
    base = call.out.name
    length = _power_sum(w, call, 1, w.fresh(base))
    floor = w.node("Max", [length, w.scalar(float(call.attrs["eps"]))], w.fresh(base))
    w.emit("Div", [w.name(call.inputs[0]), floor], call.out)


def write_square(w: OnnxWriter, x: str, axes: Sequence[int], rank: int, base: str) -> str:
    """Writes x * x, whose mean over ``axes`` follows.

    onnxruntime joins the nodes of a norm over the last axes into one kernel where the square is a Pow, not
    where it is a Mul. On its own a Mul takes less time.
    """
    last = sorted(axis % rank for axis in axes) == list(range(rank - len(axes), rank))
    return w.node("Pow", [x, w.scalar(2.0)], w.fresh(base)) if last else w.node("Mul", [x, x], w.fresh(base))


def _standardized(w: OnnxWriter, x: str, axes: Sequence[int], rank: int, eps: float, base: str) -> str:
    """Writes (x - mean) / sqrt(variance + eps) over ``axes`` of a tensor of ``rank`` axes."""
    mean = w.node("ReduceMean", [x], w.fresh(base), axes=list(axes), keepdims=1)
    apart = w.node("Sub", [x, mean], w.fresh(base))
    square = write_square(w, apart, axes, rank, base)
    variance = w.node("ReduceMean", [square], w.fresh(base), axes=list(axes), keepdims=1)
    spread = w.node("Sqrt", [w.node("Add", [variance, w.scalar(eps)], w.fresh(base))], w.fresh(base))
    return w.node("Div", [apart, spread], w.fresh(base))


def _factor(w: OnnxWriter, call: OpCall, name: str, shape: Sequence[int]) -> str | None:
    """Returns the weight or bias of a norm in ``shape``; None if there is none."""
    value = call.attrs[name]
    if value is None:
        return None
    fixed = w.value(value) if isinstance(value, TensorNode) else array(value)
    if fixed is None:
        return w.node("Reshape", [operand(w, value, np.float32), w.ints(shape)], w.fresh(call.out.name))
    stored = fixed.reshape(shape).astype(np.float32)
    return w.parameter(parameter_source(call, name), f"{call.out.name}_{name}", stored)


def _emit_whole(w: OnnxWriter, call: OpCall, op: str, shape: Sequence[int], **attributes: Any) -> bool:
    """Writes a norm as one node of type ``op``; False if the file's opset lacks it.

    Args:
        w: the writer.
        call: the norm.
        op: the ONNX op, whose weight and bias have ``shape``.
        shape: the shape of weight and bias.
        **attributes: the attributes of the op without epsilon.
    """
    if w.whole_norms < OPSETS.get(op, 0):
        return False
    parts = [
        _factor(w, call, name, shape)
        or w.constant(f"{call.out.name}_{name}", np.full(shape, default, np.float32))
        for name, default in (("weight", 1.0), ("bias", 0.0))
    ]
    w.emit(op, [w.name(call.inputs[0]), *parts], call.out, epsilon=call.attrs["eps"], **attributes)
    return True


def _finish(w: OnnxWriter, call: OpCall, name: str, shape: Sequence[int]) -> None:
    """Multiplies by the weight and adds the bias, if the norm has them."""
    weight, bias = (_factor(w, call, n, shape) for n in ("weight", "bias"))
    if weight is not None:
        name = w.node("Mul", [name, weight], call.out.name if bias is None else w.fresh(call.out.name))
    if bias is not None:
        name = w.node("Add", [name, bias], call.out.name)
    w.names[call.out] = name


def _layer_norm(w: OnnxWriter, call: OpCall) -> None:
    shape = [int(n) for n in call.inputs[0].shape]
    if "normalized_shape" in call.attrs:
        inner = call.attrs["normalized_shape"]
        count = 1 if isinstance(inner, int) else len(inner)
    else:
        count = int(call.attrs["normalized_dim"])
    axes = list(range(len(shape) - count, len(shape)))
    if _emit_whole(w, call, "LayerNormalization", shape[-count:], axis=-count):
        return
    x = _standardized(w, w.name(call.inputs[0]), axes, len(shape), call.attrs["eps"], call.out.name)
    _finish(w, call, x, shape[-count:])


def _general_norm(w: OnnxWriter, call: OpCall) -> None:
    shape = [int(n) for n in call.inputs[0].shape]
    axes = axes_of(call, "normalized_axis")
    x = _standardized(w, w.name(call.inputs[0]), axes, len(shape), call.attrs["eps"], call.out.name)
    _finish(w, call, x, [n if i in axes else 1 for i, n in enumerate(shape)])


def _group_norm(w: OnnxWriter, call: OpCall) -> None:
    """Joins the channels of a group in one axis, standardizes each group, and restores the shape."""
    shape = [int(n) for n in call.inputs[0].shape]
    groups = call.attrs.get("num_groups", call.attrs.get("group"))
    if _emit_whole(w, call, "GroupNormalization", shape[1:2], num_groups=int(groups)):
        return
    source, base = w.name(call.inputs[0]), call.out.name
    whole = w.node("Shape", [source], w.fresh(base))
    split = w.node("Reshape", [source, w.ints([0, int(groups), -1])], w.fresh(base))
    ones, zeros = (w.constant(f"{base}_groups_{n}", np.full(int(groups), n, np.float32)) for n in (1, 0))
    # One kernel in place of seven passes over the values.
    x = w.node("InstanceNormalization", [split, ones, zeros], w.fresh(base), epsilon=call.attrs["eps"])
    joined = w.node("Reshape", [x, whole], w.fresh(base))
    _finish(w, call, joined, [1, shape[1], *[1] * (len(shape) - 2)])


def _instance_norm(w: OnnxWriter, call: OpCall) -> None:
    shape = [int(n) for n in call.inputs[0].shape]
    _emit_whole(w, call, "InstanceNormalization", shape[1:2])


def _local_response_norm(w: OnnxWriter, call: OpCall) -> None:
    a: dict[str, Any] = dict(call.attrs)
    size = int(a["kernel_size"])
    # ONNX divides alpha by the size.
    options = {"alpha": float(a["alpha"]) * size, "beta": float(a["beta"]), "bias": float(a["k"])}
    w.emit("LRN", [w.name(call.inputs[0])], call.out, size=size, **options)


def _gelu(w: OnnxWriter, call: OpCall) -> None:
    """Writes x * (1 + erf(x / sqrt(2))) / 2."""
    x, base = w.name(call.inputs[0]), call.out.name
    inner = w.node("Erf", [w.node("Div", [x, w.scalar(math.sqrt(2.0))], w.fresh(base))], w.fresh(base))
    half = w.node("Mul", [x, w.scalar(0.5)], w.fresh(base))
    w.emit("Mul", [half, w.node("Add", [inner, w.scalar(1.0)], w.fresh(base))], call.out)


def _logsigmoid(w: OnnxWriter, call: OpCall) -> None:
    """Writes -softplus(-x): the logarithm of a sigmoid would be -inf for large negative x."""
    base = call.out.name
    inner = w.node("Softplus", [w.node("Neg", [w.name(call.inputs[0])], w.fresh(base))], w.fresh(base))
    w.emit("Neg", [inner], call.out)


NORMS: dict[str, Emitter] = {
    "batch_norm": _batch_norm,
    "softmax": _softmax,
    "logsoftmax": _logsoftmax,
    "logsumexp": _logsumexp,
    "norm": _norm,
    "normalize": _normalize,
    "layer_norm": _layer_norm,
    "general_norm": _general_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "local_response_norm": _local_response_norm,
    "gelu": _gelu,
    "softplus": unary("Softplus"),
    "logsigmoid": _logsigmoid,
}


# QLinearSoftmax multiplies by 1 / scale in 32 bits. On overflow, values wrap around to 0: below a
# scale of 1 / (150 * length of the axis), measured with onnxruntime 1.23 for 2 to 64 values. The bound leaves
# a margin.
_LOWEST_SCALE = 1.0 / 100.0


def softmax_overflows(graph: ConvertedGraph, call: OpCall) -> bool:
    """Whether ``call`` is a softmax whose output has a scale too small for onnxruntime's integer kernel.

    Such a scale means that no probability reached twice 1 / length: attention that is nearly uniform.
    """
    if call.kind != "softmax" or len(call.attrs["axis"]) != 1:
        return False
    length = int(call.inputs[0].shape[call.attrs["axis"][0]])
    return any(
        float(np.min(site.qparams.scale)) * length < _LOWEST_SCALE
        for site in graph.sites
        if site.sort == "activation"
        and site.decision.plan is not None
        and site.decision.plan.scheme.bits <= np.iinfo(np.int8).bits
        and _origin(graph, site.source) is call.out
    )


def _origin(graph: ConvertedGraph, node: TensorNode) -> TensorNode:
    """Returns the node that ``node`` has its values from, before the ops that only move them."""
    while (call := graph.call(node.expr)) is not None and call.role is Role.CARRY and call.inputs:
        node = call.inputs[0]
    return node


def _add(w: OnnxWriter, x: str, result: str, slope: float, offset: float) -> str:
    """Adds ``clip(slope * x + offset, 0, 1)`` and returns the name of its result."""
    if "HardSigmoid" not in w.in_pieces or not slope > 0:
        return w.node("HardSigmoid", [x], result, alpha=slope, beta=offset)
    height, shift = w.scalar(_rounded(1.0 / slope)), w.scalar(_rounded(offset / slope))
    line = w.node("Add", [x, shift], w.fresh(result))
    clipped = w.node("Clip", [line, w.scalar(0.0), height], w.fresh(result))
    return w.node("Div", [clipped, height], result)


def _rounded(value: float) -> float:
    """Returns the whole number that a value misses by rounding errors: OpenVINO compares exactly."""
    return float(round(value)) if abs(value - round(value)) < 1e-6 * abs(value) else value


def _hsigmoid(w: OnnxWriter, call: OpCall) -> None:
    w.names[call.out] = _add(w, w.name(call.inputs[0]), call.out.name, *GATE)


def _hard_sigmoid(w: OnnxWriter, call: OpCall) -> None:
    slope, offset = call.attrs["slope"], call.attrs["offset"]
    w.names[call.out] = _add(w, w.name(call.inputs[0]), call.out.name, slope, offset)


def _hswish(w: OnnxWriter, call: OpCall) -> None:
    x = w.name(call.inputs[0])
    w.emit("Mul", [x, _add(w, x, w.fresh(call.out.name), *GATE)], call.out)


HARD_SIGMOIDS: dict[str, Emitter] = {
    "hsigmoid": _hsigmoid,
    "hard_sigmoid": _hard_sigmoid,
    "hswish": _hswish,
}


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
