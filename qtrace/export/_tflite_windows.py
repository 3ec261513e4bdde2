"""TFLite for pooling and resizing."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export._tflite_build import Build, Emitter
from qtrace.export._tflite_layers import padded
from qtrace.export._tflite_layout import CHANNELS_LAST, window_pads
from qtrace.export._tflite_plan import Job
from qtrace.export._tflite_writer import Stored
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


def _even(b: Build, call: OpCall) -> tuple[int, int] | None:
    """The window of an adaptive pooling, if all its windows have one size."""
    sizes = b.shape(call.inputs[0])[2:]
    rows, columns = call.attrs["output_size"]
    return None if sizes[0] % rows or sizes[1] % columns else (sizes[0] // rows, sizes[1] // columns)


def _adaptive_mean(b: Build, job: Job) -> None:
    """On integers: MEAN, the only average that may change the scale; windows become axes of their own."""
    call = job.call
    window = _even(b, call)
    x = _image(b, call.inputs[0])
    if window is None:
        raise ExportError(
            f"{call.out.name}: windows of unequal size have no TFLite form on integers: use a size that "
            "divides the input, or pass allow_float=('adaptive_avg_pool2d',)"
        )
    target = b.target(job, CHANNELS_LAST, fuses=False)
    n, height, width, channels = x.shape
    rows, columns = window
    if (height, width) == (rows, columns):
        axes = b.writer.ints([1, 2])
        b.writer.op("MEAN", [x, axes], [target.stored], "ReducerOptions", keepDims=True)
    else:
        shape = (n, height // rows, rows, width // columns, columns, channels)
        x = b.reshaped(x, shape, 0)
        b.writer.op("MEAN", [x, b.writer.ints([2, 4])], [target.stored], "ReducerOptions", keepDims=False)
    b.done(job, target)


def _adaptive_float(b: Build, job: Job) -> None:
    call = job.call
    x = _image(b, call.inputs[0], floats=True)
    window = _even(b, call)
    out = b.result(call.out, CHANNELS_LAST)
    if window is not None:
        _pool(b, "AVERAGE_POOL_2D", x, out, "VALID", {"kernel": window, "stride": window})
    else:
        _uneven_means(b, call, x, out)
    b.put(call.out, out, CHANNELS_LAST)


def _uneven_means(b: Build, call: OpCall, x: Stored, out: Stored) -> None:
    """A product with a matrix of shares along each axis."""
    channels = x.shape[3]
    (rows, columns), (n, height, width) = call.attrs["output_size"], x.shape[:3]
    flat = b.reshaped(x, (n, height, width * channels), 0)
    first = b.like(x, f"{out.name}_rows", (n, rows, width * channels))
    left = b.writer.constant(f"{out.name}_shares", _shares(height, rows)[None])
    b.writer.op("BATCH_MATMUL", [left, flat], [first], "BatchMatMulOptions")
    images = b.reshaped(first, (n, rows, width, channels), 0)
    second = b.writer.constant(f"{out.name}_shares", _shares(width, columns)[None, None])
    b.writer.op("BATCH_MATMUL", [second, images], [out], "BatchMatMulOptions")


def _shares(size: int, count: int) -> np.ndarray:
    matrix = np.zeros((count, size), np.float32)
    for index in range(count):
        start, end = index * size // count, -(-(index + 1) * size // count)
        matrix[index, start:end] = 1.0 / (end - start)
    return matrix


def _adaptive_max(b: Build, job: Job) -> None:
    call = job.call
    window, x = _even(b, call), _image(b, call.inputs[0])
    if window is None:
        raise ExportError(
            f"{call.out.name}: adaptive pooling to {call.attrs['output_size']} has windows of unequal size, "
            "which TFLite cannot express: use a size that divides the input"
        )
    out = b.result(call.out, CHANNELS_LAST, x)
    _pool(b, "MAX_POOL_2D", x, out, "VALID", {"kernel": window, "stride": window})
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
