"""TFLite for pooling and resizing."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall
from qtrace.targets.tflite.build import Builder, Emitter
from qtrace.targets.tflite.layers import PADDING, padded, windows, zero_bias
from qtrace.targets.tflite.layout import CHANNELS_LAST
from qtrace.targets.tflite.plan import FusedOp, bounds
from qtrace.targets.tflite.writer import FileTensor, Grid, Inputs

__all__ = ["FLOAT_WINDOWS", "INTEGER_WINDOWS", "MOVING_WINDOWS", "why_in_float"]


def _image(b: Builder, node: TensorNode, floats: bool = False) -> FileTensor:
    stored = b.ordered(node, CHANNELS_LAST)
    return b.as_floats(stored) if floats else stored


def _pool(b: Builder, code: str, x: FileTensor, out: FileTensor, padding: str, window: Any) -> None:
    (height, width), (rows, columns) = window["kernel"], window["stride"]
    options = {"filterHeight": height, "filterWidth": width, "strideH": rows, "strideW": columns}
    b.writer.op(code, [x], [out], "Pool2DOptions", padding=PADDING[padding], **options)


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
    b.writer.op("MUL", [mean, factor], [out], "MulOptions")


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
        b.writer.op("MEAN", [x, b.writer.ints([1, 2])], [out], "ReducerOptions", keepDims=True)
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
    options.update(padding=PADDING["VALID"], depthMultiplier=1, dilationHFactor=1, dilationWFactor=1)
    b.writer.op("DEPTHWISE_CONV_2D", [x, weight, bias], [out], "DepthwiseConv2DOptions", **options)


def _adaptive_float(b: Builder, op: FusedOp) -> None:
    x = _image(b, op.call.inputs[0], floats=True)
    _put_pool(b, op.call, "AVERAGE_POOL_2D", x, "VALID", _adaptive_window(b, op.call))


def _adaptive_max(b: Builder, op: FusedOp) -> None:
    x = _image(b, op.call.inputs[0])
    _put_pool(b, op.call, "MAX_POOL_2D", x, "VALID", _adaptive_window(b, op.call))


def _nearest(b: Builder, op: FusedOp) -> None:
    call, x = op.call, _image(b, op.call.inputs[0])
    kind, sizes = "ResizeNearestNeighborOptions", b.shape(call.out)[2:]
    b.emit(call.out, CHANNELS_LAST, "RESIZE_NEAREST_NEIGHBOR", [x, sizes], kind, x)


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
    b.writer.op("RESIZE_BILINEAR", inputs, [out], "ResizeBilinearOptions", **corners)


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
