"""TFLite for pooling and resizing."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.tflite.build import Build, Emitter
from qtrace.export.tflite.layers import padded
from qtrace.export.tflite.layout import CHANNELS_LAST, window_pads
from qtrace.export.tflite.plan import Job
from qtrace.export.tflite.writer import Grid, Stored
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall

__all__ = ["FLOAT_WINDOWS", "INTEGER_WINDOWS", "MOVING_WINDOWS"]

_PADDING = {"SAME": 0, "VALID": 1}


def _image(b: Build, node: TensorNode, floats: bool = False) -> Stored:
    stored = b.ordered(node, CHANNELS_LAST)
    return b.as_floats(stored) if floats else stored


def _pool(b: Build, code: str, x: Stored, out: Stored, padding: str, window: Any) -> None:
    (height, width), (rows, columns) = window["kernel"], window["stride"]
    options = {"filterHeight": height, "filterWidth": width, "strideH": rows, "strideW": columns}
    b.writer.op(code, [x], [out], "Pool2DOptions", padding=_PADDING[padding], **options)


def _pads(b: Build, call: OpCall) -> tuple[str, list[tuple[int, int]]]:
    a = call.attrs
    found = [
        window_pads(i, o, k, s, p)
        for i, o, k, s, p in zip(
            b.shape(call.inputs[0])[2:],
            b.shape(call.out)[2:],
            a["kernel"],
            a["stride"],
            a["padding"],
            strict=True,
        )
    ]
    names = {name for name, _ in found}
    return (names.pop(), []) if names in ({"VALID"}, {"SAME"}) else ("", [pads for _, pads in found])


def _max_pool(b: Build, job: Job) -> None:
    call = job.call
    x = _image(b, call.inputs[0])
    padding, pads = _pads(b, call)
    if pads:
        x, padding = padded(b, x, pads, lowest=True), "VALID"
    out = b.result(call.out, CHANNELS_LAST, x)
    _pool(b, "MAX_POOL_2D", x, out, padding, call.attrs)
    b.put(call.out, out, CHANNELS_LAST)


def _avg_pool(b: Build, job: Job) -> None:
    """The mean of a window. TFLite leaves padding out of the count, MegEngine may count it."""
    call = job.call
    x, a = _image(b, call.inputs[0], floats=True), call.attrs
    padding, pads = _pads(b, call)
    out = b.result(call.out, CHANNELS_LAST)
    if not pads and (padding == "VALID" or not a["count_include_pad"]):
        _pool(b, "AVERAGE_POOL_2D", x, out, padding, a)
    elif a["count_include_pad"]:
        need = pads or [(p, p) for p in a["padding"]]
        _pool(b, "AVERAGE_POOL_2D", padded(b, x, need), out, "VALID", a)
    else:
        _uncounted_mean(b, call, padded(b, x, pads), out)
    b.put(call.out, out, CHANNELS_LAST)


def _uncounted_mean(b: Build, call: OpCall, x: Stored, out: Stored) -> None:
    """The mean with zeros around, times what the zeros took away at the borders."""
    a = call.attrs
    counts = []
    for size, places, k, s, p in zip(
        b.shape(call.inputs[0])[2:],
        b.shape(call.out)[2:],
        a["kernel"],
        a["stride"],
        a["padding"],
        strict=True,
    ):
        starts = np.arange(places) * s - p
        counts.append(np.minimum(starts + k, size) - np.maximum(starts, 0))
    share = (a["kernel"][0] * a["kernel"][1]) / np.outer(*counts)
    mean = b.like(out, f"{out.name}_padded", out.shape)
    _pool(b, "AVERAGE_POOL_2D", x, mean, "VALID", a)
    factor = b.writer.constant(f"{out.name}_share", share.astype(np.float32)[None, :, :, None])
    b.writer.op("MUL", [mean, factor], [out], "MulOptions")


def _adaptive_window(b: Build, call: OpCall) -> dict[str, tuple[int, ...]]:
    """MegEngine's windows have one size, and overlap where the output's size does not divide the input's."""
    sizes, counts = b.shape(call.inputs[0])[2:], call.attrs["output_size"]
    stride = tuple(int(n) // int(c) for n, c in zip(sizes, counts, strict=True))
    kernel = tuple(int(n) - (int(c) - 1) * s for n, c, s in zip(sizes, counts, stride, strict=True))
    return {"kernel": kernel, "stride": stride}


def _adaptive_mean(b: Build, job: Job) -> None:
    """On integers: MEAN over the whole map, else a depthwise convolution by ones.

    AVERAGE_POOL_2D gives integers of its input's scale; these two round to that of the result.
    """
    x, window = _image(b, job.call.inputs[0]), _adaptive_window(b, job.call)
    target = b.target(job, CHANNELS_LAST, fuses=False)
    if x.shape[1:3] == window["kernel"]:
        axes = b.writer.ints([1, 2])
        b.writer.op("MEAN", [x, axes], [target.stored], "ReducerOptions", keepDims=True)
    else:
        _mean_by_ones(b, x, target.stored, window)
    b.done(job, target)


def _mean_by_ones(b: Build, x: Stored, out: Stored, window: dict[str, tuple[int, ...]]) -> None:
    assert x.grid is not None
    (height, width), channels = window["kernel"], x.shape[3]
    share = np.float32(1.0) / np.float32(height * width)
    scales = np.full(channels, share, np.float32)
    ones = np.ones((1, height, width, channels), np.int8)
    weight = b.writer.constant(f"{out.name}_ones", ones, Grid.symmetric(scales), 3)
    kind = np.int64 if x.dtype == np.int16 else np.int32
    bias_grid = Grid.symmetric(scales * np.float32(x.grid.scale[0]))
    bias = b.writer.constant(f"{out.name}_zeros", np.zeros(channels, kind), bias_grid)
    options = dict(zip(("strideH", "strideW"), window["stride"], strict=True))
    options.update(padding=_PADDING["VALID"], depthMultiplier=1, dilationHFactor=1, dilationWFactor=1)
    b.writer.op("DEPTHWISE_CONV_2D", [x, weight, bias], [out], "DepthwiseConv2DOptions", **options)


def _adaptive_float(b: Build, job: Job) -> None:
    call = job.call
    x, out = _image(b, call.inputs[0], floats=True), b.result(call.out, CHANNELS_LAST)
    _pool(b, "AVERAGE_POOL_2D", x, out, "VALID", _adaptive_window(b, call))
    b.put(call.out, out, CHANNELS_LAST)


def _adaptive_max(b: Build, job: Job) -> None:
    call = job.call
    x = _image(b, call.inputs[0])
    out = b.result(call.out, CHANNELS_LAST, x)
    _pool(b, "MAX_POOL_2D", x, out, "VALID", _adaptive_window(b, call))
    b.put(call.out, out, CHANNELS_LAST)


def _nearest(b: Build, job: Job) -> None:
    call = job.call
    x = _image(b, call.inputs[0])
    out = b.result(call.out, CHANNELS_LAST, x)
    sizes = b.writer.ints(out.shape[1:3])
    b.writer.op("RESIZE_NEAREST_NEIGHBOR", [x, sizes], [out], "ResizeNearestNeighborOptions")
    b.put(call.out, out, CHANNELS_LAST)


def _interpolate(b: Build, job: Job) -> None:
    call, a = job.call, job.call.attrs
    if a["mode"] not in ("bilinear", "linear") or b.rank(call.out) != 4:
        raise ExportError(
            f"{call.out.name}: interpolate mode {a['mode']!r} has no TFLite form: use nearest or bilinear"
        )
    x = _image(b, call.inputs[0], floats=True)
    out = b.result(call.out, CHANNELS_LAST)
    how = {"alignCorners": a["align_corners"], "halfPixelCenters": not a["align_corners"]}
    b.writer.op("RESIZE_BILINEAR", [x, b.writer.ints(out.shape[1:3])], [out], "ResizeBilinearOptions", **how)
    b.put(call.out, out, CHANNELS_LAST)


# Of the modes of interpolate, nearest only moves values.
MOVING_WINDOWS: dict[str, Emitter] = {
    "max_pool2d": _max_pool,
    "adaptive_max_pool2d": _adaptive_max,
    "interpolate": _nearest,
}
INTEGER_WINDOWS: dict[str, Emitter] = {"adaptive_avg_pool2d": _adaptive_mean}
FLOAT_WINDOWS: dict[str, Emitter] = {
    "avg_pool2d": _avg_pool,
    "adaptive_avg_pool2d": _adaptive_float,
    "interpolate": _interpolate,
}
