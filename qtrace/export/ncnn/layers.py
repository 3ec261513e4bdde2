"""ncnn layers with weights, pooling and resizing; layers with rounded input and weight compute on 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.ncnn.writer import NcnnWriter, Weight, floats, integers, scale_of, tagged
from qtrace.ops import OpCall

__all__ = ["LAYERS"]

Emitter = Callable[[NcnnWriter, OpCall], None]


def _bias(w: NcnnWriter, call: OpCall) -> np.ndarray | None:
    return None if call.bias is None else w.stored(call.bias, "bias").reshape(-1)


def _input(w: NcnnWriter, call: OpCall) -> tuple[str, Weight | None, np.ndarray]:
    """Returns a layer's input blob, its weight if the layer computes on 8 bits, and the weight's numbers."""
    weight = w.weights.get(call.weight)
    if weight is None or call.inputs[0] not in w.rounded:
        return w.name(call.inputs[0]), None, w.stored(call.weight, "weight")
    return w.integer_blob(call.inputs[0]), weight, weight.integers


def _conv(w: NcnnWriter, call: OpCall) -> None:
    groups = call.attrs["groups"]
    source, weight, value = _input(w, call)
    value = value.reshape(-1, *value.shape[-3:])
    if weight is not None and groups > 1 and (value.shape[1] > 1 or len(value) != groups):
        _by_group(w, call, weight, value)
        return
    params = _window(call, value)
    if groups > 1:
        params[7] = groups
    if weight is not None:
        params[8] = 2 if groups == 1 else 1
    parts = _parts(w, call, value, weight, slice(None))
    kind = "Convolution" if groups == 1 else "ConvolutionDepthWise"
    w.emit(kind, call, params, parts, [source])


def _parts(
    w: NcnnWriter, call: OpCall, value: np.ndarray, weight: Weight | None, channels: slice
) -> list[bytes]:
    """Returns the parts of the ``.bin`` for some output channels of a layer: weight, bias and scales."""
    bias = _bias(w, call)
    parts = [tagged(value[channels]) if weight is None else integers(value[channels])]
    parts += [] if bias is None else [floats(bias[channels])]
    if weight is None:
        return parts
    scale = scale_of(weight, len(value))[channels]
    return [*parts, *(floats(np.float32(1) / s) for s in (scale, w.rounded[call.inputs[0]].qparams.scale))]


def _by_group(w: NcnnWriter, call: OpCall, weight: Weight, value: np.ndarray) -> None:
    """Writes a convolution for each group.

    ncnn's layer for groups has one weight scale for each group, and with 8 channels or more in a group it
    gives wrong floats on x86 (1.0.20261020, measured).
    """
    groups, out = call.attrs["groups"], call.out.name
    pieces = [w.fresh(out) for _ in range(groups)]
    w.slice(w.names[call.inputs[0]], pieces, [value.shape[1]] * groups, 0)
    results = []
    for index, piece in enumerate(pieces):
        channels = slice(index * len(value) // groups, (index + 1) * len(value) // groups)
        params = {**_window(call, value[channels]), 8: 2}
        parts = _parts(w, call, value, weight, channels)
        results.append(w.layer("Convolution", [piece], w.fresh(out), params, parts))
    w.emit("Concat", call, {0: 0}, bottoms=results)


def _window(call: OpCall, value: np.ndarray) -> dict[int, Any]:
    params = {0: len(value), 1: value.shape[-1], 11: value.shape[-2]}
    for key, name in ((2, "dilation"), (3, "stride"), (4, "padding")):
        params[key], params[key + 10] = call.attrs[name][1], call.attrs[name][0]
    return {**params, 5: int(call.bias is not None), 6: value.size}


def _transposed(w: NcnnWriter, call: OpCall) -> None:
    """Writes a transposed convolution in float; ncnn's weight has the output channels in front."""
    a, groups = call.attrs, call.attrs["groups"]
    value = w.stored(call.weight, "weight")
    value = value.reshape(groups, -1, *value.shape[-3:]).swapaxes(1, 2)
    value = value.reshape(-1, *value.shape[-3:])
    params = {**_window(call, value), 18: a["output_padding"][1], 19: a["output_padding"][0]}
    if groups > 1:
        params[7] = groups
    kind = "Deconvolution" if groups == 1 else "DeconvolutionDepthWise"
    w.emit(kind, call, params, _parts(w, call, value, None, slice(None)))


def _linear(w: NcnnWriter, call: OpCall) -> None:
    if len(w.shape(call.inputs[0])) > 2:
        raise ExportError("ncnn has linear layers of vectors and matrices only: reshape before it")
    source, weight, value = _input(w, call)
    params = {0: len(value), 1: int(call.bias is not None), 2: value.size}
    if weight is not None:
        params[8] = 2
    w.emit("InnerProduct", call, params, _parts(w, call, value, weight, slice(None)), [source])


def _pool(kind: int) -> Emitter:
    def emit(w: NcnnWriter, call: OpCall) -> None:
        a = call.attrs
        params = {0: kind, 1: a["kernel"][1], 11: a["kernel"][0], 2: a["stride"][1], 12: a["stride"][0]}
        params.update({3: a["padding"][1], 13: a["padding"][0], 5: 1})  # sizes are rounded down
        if kind == 1:
            params[6] = int(a["count_include_pad"])
        w.emit("Pooling", call, params)

    return emit


def _adaptive(kind: int) -> Emitter:
    def emit(w: NcnnWriter, call: OpCall) -> None:
        height, width = call.attrs["output_size"]
        w.emit("Pooling", call, {0: kind, 7: 1, 8: width, 18: height})

    return emit


_MODES = {"nearest": 1, "bilinear": 2, "linear": 2, "bicubic": 3}


def _interpolate(w: NcnnWriter, call: OpCall) -> None:
    a = call.attrs
    mode = _MODES.get(a["mode"])
    if mode is None or len(call.out.shape) != 4:
        raise ExportError(f"ncnn has no interpolate in mode {a['mode']!r}: use nearest, bilinear or bicubic")
    height, width = w.shape(call.out)[-2:]
    w.emit("Interp", call, {0: mode, 3: height, 4: width, 6: int(a["align_corners"])})


LAYERS: dict[str, Emitter] = {
    "conv2d": _conv,
    "conv_transpose2d": _transposed,
    "linear": _linear,
    "max_pool2d": _pool(0),
    "avg_pool2d": _pool(1),
    "adaptive_max_pool2d": _adaptive(0),
    "adaptive_avg_pool2d": _adaptive(1),
    "interpolate": _interpolate,
}
