"""Reductions and windows."""

from __future__ import annotations

from typing import Any

import numpy as np
from ai_edge_litert.schema_py_generated import Padding

from qtrace.errors import ExportError
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import owner
from qtrace.ops import OpCall
from qtrace.targets.tflite.build import Builder, Emitter, OrderedTensor
from qtrace.targets.tflite.layers import padded, windows, zero_bias
from qtrace.targets.tflite.layout import CHANNELS_LAST, FusedOp, Order, bounds, file_shape, natural
from qtrace.targets.tflite.writer import FileTensor, Grid, Inputs

__all__ = [
    "FLOAT_REDUCTIONS",
    "FLOAT_WINDOWS",
    "INTEGER_REDUCTIONS",
    "INTEGER_WINDOWS",
    "MOVING_REDUCTIONS",
    "MOVING_WINDOWS",
    "why_in_float",
]


def _left(order: Order, axes: tuple[int, ...], keeps: bool) -> Order:
    """Returns the order of the result when ``axes`` are reduced."""
    if keeps:
        return order
    left = [axis for axis in range(len(order)) if axis not in axes]
    return tuple(left.index(axis) for axis in order if axis not in axes)


def _axes(b: Builder, call: OpCall) -> tuple[OrderedTensor, tuple[int, ...], FileTensor, bool]:
    """Returns the input, the reduced axes of the graph and of the file, and whether they stay with size 1."""
    source = b.get(call.inputs[0])
    rank, named_axes = len(source.order), call.attrs["axis"]
    axes = tuple(range(rank)) if named_axes is None else tuple(a % rank for a in named_axes)
    places = b.writer.ints(sorted(source.order.index(a) for a in axes))
    return source, axes, places, b.rank(call.out) == rank


def _reduced(code: str) -> Emitter:
    """Emits MEAN, SUM or REDUCE_PROD, on integers where the result has a site."""

    def emit(b: Builder, op: FusedOp) -> None:
        source, axes, places, keeps = _axes(b, op.call)
        target = b.target(op, _left(source.order, axes, keeps), fuses=False)
        x = source.tensor if op.site is not None else b.as_floats(source.tensor)
        b.writer.op(code, [x, places], [target.tensor], keepDims=keeps)
        b.finish(op, target)

    return emit


def _extreme(code: str) -> Emitter:
    """Emits a maximum or minimum; on integers it keeps the grid of the input."""

    def emit(b: Builder, op: FusedOp) -> None:
        source, axes, places, keeps = _axes(b, op.call)
        order, x = _left(source.order, axes, keeps), source.tensor
        b.emit(op.call.out, order, code, [x, places], x, keepDims=keeps)

    return emit


def _argument(code: str) -> Emitter:
    def emit(b: Builder, op: FusedOp) -> None:
        call = op.call
        source, axes, _, keeps = _axes(b, call)
        if len(axes) != 1:
            raise ExportError(
                f"{call.out.name}: the place of an extreme has a TFLite form along one axis only: "
                "flatten the axes before"
            )
        if source.tensor.dtype == np.int16:  # the operator reads 8 bits or floats
            source = b.floats(source)
        order = _left(source.order, axes, False)
        shape = [n for i, n in enumerate(source.tensor.shape) if source.order[i] != axes[0]]
        positions = b.writer.tensor(call.out.name, shape, np.int32)
        axis = b.writer.constant("axis", np.array(source.order.index(axes[0]), np.int32))
        b.writer.op(code, [source.tensor, axis], [positions], outputType=2)
        if keeps:
            order = source.order
            positions = b.reshaped(positions, file_shape(b.shape(call.out), order), order.index(0))
        b.put(call.out, positions, order)

    return emit


def _ranked(b: Builder, op: FusedOp) -> None:
    """Writes TOPK_V2 for ``topk``, ``sort`` and ``argsort``: the largest first, or of the negative."""
    call, a = op.call, op.call.attrs
    source = b.floats(b.get(call.inputs[0]))
    order = natural(len(source.order))
    x, base = b.arrange(source, order), call.out.name
    size = x.shape[-1]
    count = min(b.number(a["k"], f"{base}: its k"), size) if "k" in a else size
    if a["descending"] not in (True, False):
        raise ExportError(f"{base}: an order that is computed cannot become TFLite: use True or False")
    if not a["descending"]:
        x = b.add("NEG", [x], f"{base}_negative", x.shape, kind="NegOptions")
    shape = (*x.shape[:-1], count)
    best, places = b.like(x, f"{base}_best", shape), b.writer.tensor(f"{base}_places", shape, np.int32)
    number = b.writer.constant("k", np.array([count], np.int32))
    b.writer.op("TOPK_V2", [x, number], [best, places])
    if not a["descending"]:
        best = b.add("NEG", [best], f"{base}_ranked", shape, kind="NegOptions")
    results = [places] if len(call.outputs) == 1 else [best, places]
    for node, result in zip(call.outputs, results, strict=True):
        if a.get("kth_only"):
            last = b.like(result, f"{node.name}_last", (*shape[:-1], 1))
            b.cut(result, last, {len(shape) - 1: (count - 1, count, 1)})
            result = b.reshaped(last, b.shape(node), 0)
        b.put(node, result, natural(b.rank(node)))


def _along_last_axis(code: str, **options: Any) -> Emitter:
    """Emits an operator that works along the last axis of the file."""

    def emit(b: Builder, op: FusedOp) -> None:
        call, source = op.call, b.floats(b.get(op.call.inputs[0]))
        axes = np.atleast_1d(call.attrs["axis"])
        if len(axes) != 1:
            raise ExportError(f"{call.out.name}: softmax over many axes cannot become TFLite: use one axis")
        axis = int(axes[0]) % len(source.order)
        order = (*(a for a in source.order if a != axis), axis)
        out = b.result(call.out, order)
        b.writer.op(code, [b.arrange(source, order)], [out], **options)
        b.put(call.out, out, order)

    return emit


def _batch_norm(b: Builder, op: FusedOp) -> None:
    """Writes a BatchNorm that is not folded, as a factor and a summand for each channel."""
    call = op.call
    source = b.floats(b.get(call.inputs[0]))
    module: Any = owner(call.expr)
    names = ("running_mean", "running_var", "weight", "bias")
    mean, var, weight, bias = (
        _parameter(b, getattr(module, n) if module is not None else call.attrs[n]) for n in names
    )
    assert mean is not None
    assert var is not None
    factor = 1.0 / np.sqrt(var.reshape(-1).astype(np.float64) + call.attrs["eps"])
    factor = factor if weight is None else factor * weight.reshape(-1)
    summand = (0.0 if bias is None else bias.reshape(-1)) - mean.reshape(-1) * factor
    rank = len(source.order)
    wide = [v.astype(np.float32).reshape(1, -1, *[1] * (rank - 2)) for v in (factor, summand)]
    laid = [
        b.writer.constant(f"{call.out.name}_{n}", v.transpose(source.order))
        for n, v in zip(("factor", "summand"), wide, strict=True)
    ]
    x, order = source.parts
    scaled = b.writer.add("MUL", [x, laid[0]], f"{call.out.name}_scaled", x.shape)
    b.emit(call.out, order, "ADD", [scaled, laid[1]])


def _parameter(b: Builder, value: Any) -> np.ndarray | None:
    """Returns the value of a norm's parameter; None if there is none.

    Raises:
        ExportError: when it is computed from an input of the graph.
    """
    if isinstance(value, TensorNode):
        known = b.value(value)
        if known is None:
            raise ExportError(
                f"{value.name}: a norm with parameters computed from an input cannot become TFLite: write "
                "it as a product and a sum"
            )
        return known
    return None if value is None else np.asarray(value.numpy())


def _normalized(b: Builder, call: OpCall, x: FileTensor, places: list[int]) -> FileTensor:
    """Normalizes to zero mean and unit variance over file axes ``places``."""
    axes, small = b.writer.ints(places), [1 if i in places else n for i, n in enumerate(x.shape)]

    def add(code: str, inputs: list[FileTensor], shape: Any, **options: Any) -> FileTensor:
        return b.writer.add(code, inputs, f"{call.out.name}_{code.lower()}", shape, **options)

    mean = add("MEAN", [x, axes], small, keepDims=True)
    centered = add("SUB", [x, mean], x.shape)
    squares = add("SQUARED_DIFFERENCE", [x, mean], x.shape)
    spread = add("MEAN", [squares, axes], small, keepDims=True)
    epsilon = b.writer.constant("epsilon", np.array(call.attrs["eps"], np.float32))
    inverse = add("RSQRT", [add("ADD", [spread, epsilon], small)], small)
    return add("MUL", [centered, inverse], x.shape)


def _put_affine(b: Builder, call: OpCall, x: FileTensor, order: Order, column: tuple[int, ...] = ()) -> None:
    """Makes weight * ``x`` + bias the result; weight and bias broadcast in the graph's order.

    Args:
        b: the file.
        call: the op, with its weight and bias.
        x: the values.
        order: the order of the axes of ``x``.
        column: the shape in which weight and bias broadcast; () for the shape that they have.
    """
    for code, name in (("MUL", "weight"), ("ADD", "bias")):
        value = _parameter(b, call.attrs[name])
        if value is not None:
            value = value.reshape(column or value.shape)
            wide = value.reshape((1,) * (len(order) - value.ndim) + value.shape).transpose(order)
            result = b.writer.tensor(call.out.name, x.shape)
            factor = b.writer.constant(f"{call.out.name}_{code.lower()}_by", wide.astype(np.float32))
            b.writer.op(code, [x, factor], [result])
            x = result
    b.put(call.out, x, order)


def _layer_norm(b: Builder, op: FusedOp) -> None:
    """Normalizes over the last axes of the graph."""
    call, (x, order) = op.call, b.floats(b.get(op.call.inputs[0])).parts
    shape = call.attrs.get("normalized_shape")
    count = int(call.attrs["normalized_dim"]) if shape is None else np.size(shape)
    places = sorted(order.index(len(order) - 1 - i) for i in range(count))
    _put_affine(b, call, _normalized(b, call, x, places), order)


def _group_norm(b: Builder, op: FusedOp) -> None:
    """Normalizes over the channels of a group and the whole map; groups become an axis of their own."""
    call, (x, order) = op.call, b.floats(b.get(op.call.inputs[0])).parts
    place, batch = order.index(1), order.index(0)
    channels = x.shape[place]
    count = channels
    if call.kind != "instance_norm":
        count = int(call.attrs.get("num_groups") or call.attrs["group"])
    apart = (*x.shape[:place], count, channels // count, *x.shape[place + 1 :])
    places = [i for i in range(len(apart)) if i not in (batch + (batch > place), place)]
    normal = b.reshaped(_normalized(b, call, b.reshaped(x, apart, batch), places), x.shape, batch)
    _put_affine(b, call, normal, order, (-1, *[1] * (len(order) - 2)))


def _by_length(b: Builder, op: FusedOp) -> None:
    """Divides by the root of the sum or the mean of squares along one axis."""
    call, (x, order) = op.call, b.floats(b.get(op.call.inputs[0])).parts
    norm, axis = call.attrs.get("ord"), call.attrs["axis"]
    if norm not in (None, 2) or not isinstance(axis, int):
        raise ExportError(
            f"{call.out.name}: a normalization by a norm of order {norm} over the axis {axis} cannot "
            "become TFLite: use order 2 and one axis"
        )
    place = order.index(axis % len(order))
    small = [1 if i == place else n for i, n in enumerate(x.shape)]

    def add(code: str, inputs: list[FileTensor], shape: Any, **options: Any) -> FileTensor:
        return b.writer.add(code, inputs, f"{call.out.name}_{code.lower()}", shape, **options)

    eps = float(call.attrs["eps"])
    squares, axes = add("SQUARE", [x], x.shape), b.writer.ints([place])
    if call.kind == "rms_norm":
        mean = add("MEAN", [squares, axes], small, keepDims=True)
        number = b.writer.constant("epsilon", np.array(eps, np.float32))
        total = add("ADD", [mean, number], small)
    else:
        length = add("SUM", [squares, axes], small, keepDims=True)
        number = b.writer.constant("epsilon", np.array(eps * eps, np.float32))
        total = add("MAXIMUM", [length, number], small)
    result = add("MUL", [x, add("RSQRT", [total], small)], x.shape)
    weight = None if call.attrs.get("weight") is None else _parameter(b, call.attrs["weight"])
    if weight is not None:
        wide = weight.reshape((1,) * (len(order) - weight.ndim) + weight.shape).transpose(order)
        factor = b.writer.constant(f"{call.out.name}_weight", wide.astype(np.float32))
        result = add("MUL", [result, factor], x.shape)
    b.put(call.out, result, order)


def _norm(b: Builder, op: FusedOp) -> None:
    """Writes a vector norm: the root of a sum of squares, or a sum of absolute values."""
    call = op.call
    power, axis = call.attrs.get("ord"), call.attrs["axis"]
    if power not in (None, 1, 2) or axis is None:
        raise ExportError(
            f"{call.out.name}: a norm of order {power} over the axis {axis} cannot become TFLite: use 1 or "
            "2 over named axes"
        )
    source = b.floats(b.get(call.inputs[0]))
    x, rank = source.tensor, len(source.order)
    axes = tuple(int(a) % rank for a in np.atleast_1d(axis))
    keeps = b.rank(call.out) == rank
    places = b.writer.ints(sorted(source.order.index(a) for a in axes))
    name = f"{call.out.name}_terms"
    terms = b.add("ABS", [x], name, x.shape) if power == 1 else b.add("MUL", [x, x], name, x.shape)
    out = b.result(call.out, order := _left(source.order, axes, keeps))
    total = out if power == 1 else b.like(out, f"{call.out.name}_sum", out.shape)
    b.writer.op("SUM", [terms, places], [total], keepDims=keeps)
    if power != 1:
        b.writer.op("SQRT", [total], [out])
    b.put(call.out, out, order)


INTEGER_REDUCTIONS: dict[str, Emitter] = {"mean": _reduced("MEAN"), "sum": _reduced("SUM")}
MOVING_REDUCTIONS: dict[str, Emitter] = {"max": _extreme("REDUCE_MAX"), "min": _extreme("REDUCE_MIN")}
FLOAT_REDUCTIONS: dict[str, Emitter] = {
    **INTEGER_REDUCTIONS,
    "prod": _reduced("REDUCE_PROD"),
    "argmax": _argument("ARG_MAX"),
    **dict.fromkeys(("topk", "sort", "argsort"), _ranked),
    "argmin": _argument("ARG_MIN"),
    "softmax": _along_last_axis("SOFTMAX", beta=1.0),
    "logsoftmax": _along_last_axis("LOG_SOFTMAX"),
    "batch_norm": _batch_norm,
    "norm": _norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "instance_norm": _group_norm,
    **dict.fromkeys(("normalize", "rms_norm"), _by_length),
}


def _image(b: Builder, node: TensorNode, floats: bool = False) -> FileTensor:
    stored = b.ordered(node, CHANNELS_LAST)
    return b.as_floats(stored) if floats else stored


def _pool(b: Builder, code: str, x: FileTensor, out: FileTensor, padding: str, window: Any) -> None:
    (height, width), (rows, columns) = window["kernel"], window["stride"]
    options = {"filterHeight": height, "filterWidth": width, "strideH": rows, "strideW": columns}
    b.writer.op(code, [x], [out], padding=getattr(Padding, padding), **options)


def _max_pool(b: Builder, op: FusedOp) -> None:
    call, x = op.call, _image(b, op.call.inputs[0])
    padding, pads = windows(b, call, call.attrs["kernel"])
    if pads:
        lowest = x.grid is not None or not _is_positive(b, call.inputs[0])
        x, padding = padded(b, x, pads, lowest), "VALID"
    _put_pool(b, call, "MAX_POOL_2D", x, padding, call.attrs)


def _is_positive(b: Builder, node: TensorNode) -> bool:
    """Returns whether an op gives no value below zero, so that zeros never are the maximum of a window."""
    call = b.plan.graph.call(node.expr)
    while call is not None and call.kind in ("max_pool2d", "adaptive_max_pool2d", "identity"):
        call = b.plan.graph.call(call.inputs[0].expr)
    if call is None:
        return False
    if call.kind == "clip":
        low = bounds(call)[0]
        return isinstance(low, (int, float)) and low >= 0
    return call.kind in ("relu", "relu6", "sigmoid")


def _put_pool(b: Builder, call: OpCall, code: str, x: FileTensor, padding: str, window: Any) -> None:
    """Adds the pooling that computes ``call``, in the type of ``x``."""
    out = b.result(call.out, CHANNELS_LAST, x)
    _pool(b, code, x, out, padding, window)
    b.put(call.out, out, CHANNELS_LAST)


def _avg_pool(b: Builder, op: FusedOp) -> None:
    """Writes the mean of a window. TFLite does not count padding, MegEngine may count it."""
    call = op.call
    x, a = _image(b, call.inputs[0], floats=True), call.attrs
    padding, pads = windows(b, call, a["kernel"])
    out = b.result(call.out, CHANNELS_LAST)
    if not pads and (padding == "VALID" or not a["count_include_pad"]):
        _pool(b, "AVERAGE_POOL_2D", x, out, padding, a)
    elif a["count_include_pad"]:
        need = pads or [(p, p) for p in a["padding"]]
        _pool(b, "AVERAGE_POOL_2D", padded(b, x, need), out, "VALID", a)
    else:
        _uncounted_mean(b, call, padded(b, x, pads), out)
    b.put(call.out, out, CHANNELS_LAST)


def _integer_avg_pool(b: Builder, op: FusedOp) -> None:
    """Writes the mean of a window on integers.

    Where padding counts, or there is none, the window is a convolution by ones, which rounds to the
    scale of the result. Else AVERAGE_POOL_2D divides by the number of places inside the image.
    """
    call, a = op.call, op.call.attrs
    x, target = _image(b, call.inputs[0]), b.target(op, CHANNELS_LAST, fuses=False)
    if _leaves_padding_out(call):
        b.note_inexact(op)
        _mean_inside(b, x, target.tensor, a)
    else:
        need = windows(b, call, a["kernel"])[1] or [(p, p) for p in a["padding"]]
        _mean(b, padded(b, x, need) if any(map(any, need)) else x, target.tensor, a)
    b.finish(op, target)


def _leaves_padding_out(call: OpCall) -> bool:
    """Returns whether padding does not count in the means of an op."""
    return any(call.attrs["padding"]) and not call.attrs["count_include_pad"]


def _mean_inside(b: Builder, x: FileTensor, out: FileTensor, window: Any) -> None:
    """Writes the means of the places of windows that lie inside the image, which is padded by half a window.

    AVERAGE_POOL_2D pads so only at stride 1: larger strides take every second or third result of it.
    """
    whole = out if window["stride"] == (1, 1) else b.like(x, f"{out.name}_whole", x.shape)
    _pool(b, "AVERAGE_POOL_2D", x, whole, "SAME", {**window, "stride": (1, 1)})
    if whole is not out:
        steps = zip((1, 2), out.shape[1:3], window["stride"], strict=True)
        b.cut(whole, out, {i: (0, (n - 1) * s + 1, s) for i, n, s in steps})


def _uncounted_mean(b: Builder, call: OpCall, x: FileTensor, out: FileTensor) -> None:
    """Writes the mean over windows with padding, times window size / number of places inside the image."""
    a = call.attrs
    counts = []
    sizes = (b.shape(call.inputs[0])[2:], b.shape(call.out)[2:])
    for size, count, k, s, p in zip(*sizes, a["kernel"], a["stride"], a["padding"], strict=True):
        starts = np.arange(count) * s - p
        counts.append(np.minimum(starts + k, size) - np.maximum(starts, 0))
    share = (a["kernel"][0] * a["kernel"][1]) / np.outer(*counts)
    mean = b.like(out, f"{out.name}_padded", out.shape)
    _pool(b, "AVERAGE_POOL_2D", x, mean, "VALID", a)
    factor = b.writer.constant(f"{out.name}_share", share.astype(np.float32)[None, :, :, None])
    b.writer.op("MUL", [mean, factor], [out])


def _adaptive_window(b: Builder, call: OpCall) -> dict[str, tuple[int, ...]]:
    """Returns kernel and stride: MegEngine's windows have one size, and overlap where sizes do not divide."""
    sizes, counts = b.shape(call.inputs[0])[2:], call.attrs["output_size"]
    stride = tuple(int(n) // int(c) for n, c in zip(sizes, counts, strict=True))
    kernel = tuple(int(n) - (int(c) - 1) * s for n, c, s in zip(sizes, counts, stride, strict=True))
    return {"kernel": kernel, "stride": stride}


def _adaptive_mean(b: Builder, op: FusedOp) -> None:
    """Writes adaptive pooling on integers: MEAN over the whole map, else a depthwise convolution by ones.

    AVERAGE_POOL_2D keeps the scale of its input; these two round to the scale of the result.
    """
    target = b.target(op, CHANNELS_LAST, fuses=False)
    _mean(b, _image(b, op.call.inputs[0]), target.tensor, _adaptive_window(b, op.call))
    b.finish(op, target)


def _mean(b: Builder, x: FileTensor, out: FileTensor, window: Any) -> None:
    """Writes the means of windows of ``x``, which need no padding, at the scale of ``out``."""
    if x.shape[1:3] == window["kernel"]:
        b.writer.op("MEAN", [x, b.writer.ints([1, 2])], [out], keepDims=True)
    else:
        _mean_by_ones(b, x, out, window)


def _mean_by_ones(b: Builder, x: FileTensor, out: FileTensor, window: Any) -> None:
    (height, width), channels = window["kernel"], x.shape[3]
    share = np.float32(1.0) / np.float32(height * width)
    scales = np.full(channels, share, np.float32)
    ones = np.ones((1, height, width, channels), np.int8)
    weight = b.writer.constant(f"{out.name}_ones", ones, Grid.symmetric(scales), 3)
    bias = zero_bias(b, out.name, channels, x, scales)
    options = dict(zip(("strideH", "strideW"), window["stride"], strict=True))
    options.update(padding=Padding.VALID, depthMultiplier=1, dilationHFactor=1, dilationWFactor=1)
    b.writer.op("DEPTHWISE_CONV_2D", [x, weight, bias], [out], **options)


def _adaptive_float(b: Builder, op: FusedOp) -> None:
    x = _image(b, op.call.inputs[0], floats=True)
    _put_pool(b, op.call, "AVERAGE_POOL_2D", x, "VALID", _adaptive_window(b, op.call))


def _adaptive_max(b: Builder, op: FusedOp) -> None:
    x = _image(b, op.call.inputs[0])
    _put_pool(b, op.call, "MAX_POOL_2D", x, "VALID", _adaptive_window(b, op.call))


def _nearest(b: Builder, op: FusedOp) -> None:
    call, x = op.call, _image(b, op.call.inputs[0])
    b.emit(call.out, CHANNELS_LAST, "RESIZE_NEAREST_NEIGHBOR", [x, b.shape(call.out)[2:]], x)


def _interpolate(b: Builder, op: FusedOp) -> None:
    """Writes bilinear resizing in float."""
    out = b.result(op.call.out, CHANNELS_LAST)
    _resize(b, op.call, _image(b, op.call.inputs[0], floats=True), out)
    b.put(op.call.out, out, CHANNELS_LAST)


def _integer_interpolate(b: Builder, op: FusedOp) -> None:
    """Writes bilinear resizing on integers, whose result has the scale of the input."""
    target = b.target(op, CHANNELS_LAST, fuses=False)
    _resize(b, op.call, _image(b, op.call.inputs[0]), target.tensor)
    b.note_inexact(op)
    b.finish(op, target)


def _resize(b: Builder, call: OpCall, x: FileTensor, out: FileTensor) -> None:
    a = call.attrs
    if a["mode"] not in ("bilinear", "linear") or b.rank(call.out) != 4:
        raise ExportError(
            f"{call.out.name}: interpolate mode {a['mode']!r} cannot become TFLite: use nearest or bilinear"
        )
    inputs: Inputs = [x, b.shape(call.out)[2:]]
    corners = {"alignCorners": a["align_corners"], "halfPixelCenters": not a["align_corners"]}
    b.writer.op("RESIZE_BILINEAR", inputs, [out], **corners)


def why_in_float(b: Builder, op: FusedOp) -> str:
    """Returns why a window of an op lacks an integer kernel that its kind has; "" if it has one."""
    call, a = op.call, op.call.attrs
    if call.kind == "avg_pool2d" and _leaves_padding_out(call):
        if any(k != 2 * p + 1 for k, p in zip(a["kernel"], a["padding"], strict=True)):
            return "AVERAGE_POOL_2D pads otherwise, and no other integer kernel leaves padding out of a mean"
        return "" if _keeps_grid(b, op) else "AVERAGE_POOL_2D cannot change the scale, as its site demands"
    if call.kind == "interpolate":
        if b.site_grid(op)[1] != np.int8:
            return "LiteRT's RESIZE_BILINEAR is wrong by hundreds of steps on 16 bits"
        return "" if _keeps_grid(b, op) else "RESIZE_BILINEAR cannot change the scale, as its site demands"
    return ""


def _keeps_grid(b: Builder, op: FusedOp) -> bool:
    """Returns whether the result of an op has the grid of its input."""
    return b.moved_from(op.call.inputs[0])[0].tensor.grid == b.site_grid(op)[2]


# Of the modes of interpolate, nearest only moves values.
MOVING_WINDOWS: dict[str, Emitter] = {
    "max_pool2d": _max_pool,
    "adaptive_max_pool2d": _adaptive_max,
    "interpolate": _nearest,
}
INTEGER_WINDOWS: dict[str, Emitter] = {
    "avg_pool2d": _integer_avg_pool,
    "adaptive_avg_pool2d": _adaptive_mean,
    "interpolate": _integer_interpolate,
}
FLOAT_WINDOWS: dict[str, Emitter] = {
    "avg_pool2d": _avg_pool,
    "adaptive_avg_pool2d": _adaptive_float,
    "interpolate": _interpolate,
}
