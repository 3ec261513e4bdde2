"""Caffe layers for each op kind. An emitter reads an `OpCall` and adds the layers that compute its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.ops import OpCall
from qtrace.targets.caffe.arithmetic import ARITHMETIC
from qtrace.targets.caffe.writer import CaffeWriter

__all__ = ["EMITTERS"]

Emitter = Callable[[CaffeWriter, OpCall], None]


def _blobs(w: CaffeWriter, call: OpCall) -> list[np.ndarray]:
    """Returns weight and bias of a layer."""
    bias = [] if call.bias is None else [w.stored(call.bias, "bias").reshape(-1)]
    return [w.stored(call.weight, "weight"), *bias]


def _conv(w: CaffeWriter, call: OpCall) -> None:
    a, transposed = call.attrs, call.kind == "conv_transpose2d"
    weight, *bias = _blobs(w, call)
    weight = weight.reshape(-1, *weight.shape[-3:])  # without the axis of groups
    if transposed and any(a["output_padding"]):
        raise ExportError("Caffe's Deconvolution lacks output_padding: give the transposed convolution none")
    fields = {
        "num_output": weight.shape[1] * a["groups"] if transposed else weight.shape[0],
        "bias_term": call.bias is not None,
        "group": a["groups"],
        "dilation": a["dilation"],
        **_window(weight.shape[-2:], a["stride"], a["padding"]),
    }
    w.emit("Deconvolution" if transposed else "Convolution", call, [weight, *bias], convolution_param=fields)


def _window(kernel: Any, stride: Any, padding: Any) -> dict[str, Any]:
    sides = {"kernel": kernel, "stride": stride, "pad": padding}
    return {
        f"{name}_{axis}": int(n) for name, pair in sides.items() for axis, n in zip("hw", pair, strict=True)
    }


def _linear(w: CaffeWriter, call: OpCall) -> None:
    blobs, axis = _blobs(w, call), len(call.inputs[0].shape) - 1
    fields = {"num_output": len(blobs[0]), "bias_term": call.bias is not None, "axis": axis}
    w.emit("InnerProduct", call, blobs, inner_product_param=fields)


def _pool(method: str) -> Emitter:
    def emit(w: CaffeWriter, call: OpCall) -> None:
        a, x = call.attrs, call.inputs[0]
        if method == "AVE" and any(a["padding"]) and not a["count_include_pad"]:
            raise ExportError("Caffe's average counts the padding: use mode='average', or no padding")
        fields = {"pool": method, **_window(a["kernel"], a["stride"], a["padding"])}
        sizes = zip(x.shape[-2:], a["kernel"], a["stride"], a["padding"], strict=True)
        if any((int(n) + 2 * p - k) % s for n, k, s, p in sizes):
            # Caffe rounds the size up by default. OpenCV and many others call the field that changes this
            # ceil_mode. It is left out where both sizes agree, so that any Caffe reads the file.
            fields["ceil_mode"] = False
        w.emit("Pooling", call, pooling_param=fields)

    return emit


def _adaptive(method: str) -> Emitter:
    def emit(w: CaffeWriter, call: OpCall) -> None:
        size, shape = call.attrs["output_size"], [int(n) for n in call.inputs[0].shape[-2:]]
        if size == (1, 1):
            w.emit("Pooling", call, pooling_param={"pool": method, "global_pooling": True})
            return
        if any(n % s for n, s in zip(shape, size, strict=True)):
            raise ExportError(
                f"adaptive pooling of {tuple(shape)} to {size} has windows of unequal size, which Caffe "
                "cannot express: use a size that divides the input"
            )
        kernel = [n // s for n, s in zip(shape, size, strict=True)]
        w.emit("Pooling", call, pooling_param={"pool": method, **_window(kernel, kernel, (0, 0))})

    return emit


def _mean(w: CaffeWriter, call: OpCall) -> None:
    x, rank = call.inputs[0], len(call.inputs[0].shape)
    axes = call.attrs["axis"]
    if rank != 4 or axes is None or sorted(a % 4 for a in axes) != [2, 3]:
        raise ExportError("Caffe has a mean over the whole image only: take it over axes 2 and 3")
    fields = {"pool": "AVE", "global_pooling": True}
    if len(call.out.shape) == 4:
        w.emit("Pooling", call, pooling_param=fields)
        return
    pooled = w.layer("Pooling", [w.name(x)], w.fresh(call.out.name), pooling_param=fields)
    w.emit("Flatten", call, bottoms=[pooled], flatten_param={"axis": 1})


def _interpolate(w: CaffeWriter, call: OpCall) -> None:
    """Repeats pixels by whole factors: a transposed convolution of each channel with ones."""
    inside, outside = ([int(n) for n in node.shape[-2:]] for node in (call.inputs[0], call.out))
    if call.attrs["mode"] != "nearest" or any(o % i for o, i in zip(outside, inside, strict=True)):
        raise ExportError("Caffe resizes by whole factors and nearest values only: use mode='nearest'")
    factor = [o // i for o, i in zip(outside, inside, strict=True)]
    channels = int(call.out.shape[1])
    fields = {"num_output": channels, "bias_term": False, "group": channels}
    fields.update(_window(factor, factor, (0, 0)))
    ones = np.ones((channels, 1, *factor), np.float32)
    w.emit("Deconvolution", call, [ones], convolution_param=fields)


def _concat(w: CaffeWriter, call: OpCall) -> None:
    names = [w.name(n) for n in call.attrs["parts"]]
    axis = call.attrs["axis"] % len(call.out.shape)
    w.emit("Concat", call, bottoms=names, concat_param={"axis": axis})


def _split(w: CaffeWriter, call: OpCall) -> None:
    axis = call.attrs["axis"] % len(call.inputs[0].shape)
    places = np.cumsum([int(n.shape[axis]) for n in call.outputs])[:-1].tolist()
    tops, fields = [n.name for n in call.outputs], {"axis": axis, "slice_point": places}
    w.layers("Slice", [w.name(call.inputs[0])], call.out.name, tops, slice_param=fields)
    w.names.update((n, n.name) for n in call.outputs)


def _flatten(w: CaffeWriter, call: OpCall) -> None:
    rank = max(len(call.inputs[0].shape), 1)
    fields = {"axis": call.attrs["start"] % rank, "end_axis": call.attrs["end"] % rank}
    w.emit("Flatten", call, flatten_param=fields)


def _reshape(w: CaffeWriter, call: OpCall) -> None:
    """Reshapes to the traced shape; 0 copies the batch."""
    before, after = ([int(n) for n in node.shape] for node in (call.inputs[0], call.out))
    if not before or not after or before[0] != after[0]:
        raise ExportError("it changes the batch, which Caffe keeps in front: leave axis 0 as it is")
    w.emit("Reshape", call, reshape_param={"shape": {"dim": [0, *after[1:]]}})


def _transpose(w: CaffeWriter, call: OpCall) -> None:
    rank = len(call.inputs[0].shape)
    pattern = call.attrs["pattern"] or tuple(reversed(range(rank)))
    if not all(isinstance(p, int) for p in pattern) or len(pattern) != rank:
        raise ExportError(f"Caffe cannot transpose by {pattern!r}: use all axes")
    w.emit("Permute", call, permute_param={"order": [p % rank for p in pattern]})


def _identity(w: CaffeWriter, call: OpCall) -> None:
    w.names[call.out] = w.name(call.inputs[0])


EMITTERS: dict[str, Emitter] = {
    **ARITHMETIC,
    "conv2d": _conv,
    "conv_transpose2d": _conv,
    "linear": _linear,
    "max_pool2d": _pool("MAX"),
    "avg_pool2d": _pool("AVE"),
    "adaptive_avg_pool2d": _adaptive("AVE"),
    "adaptive_max_pool2d": _adaptive("MAX"),
    "mean": _mean,
    "interpolate": _interpolate,
    "concat": _concat,
    "split": _split,
    "flatten": _flatten,
    **dict.fromkeys(("reshape", "expand_dims", "squeeze"), _reshape),
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(("identity", "dropout"), _identity),
}
