"""Layers and norms of an ncnn net."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import users
from qtrace.ops import OpCall, read
from qtrace.targets.ncnn.writer import NcnnWriter, Weight, floats, integers, scale_of, tagged

Emitter = Callable[[NcnnWriter, OpCall], None]


def _input(w: NcnnWriter, call: OpCall, rows: int = 0) -> tuple[str, Weight | None, np.ndarray]:
    """Returns a layer's input blob, its weight if the layer computes on 8 bits, and the weight's numbers.

    With ``rows``, a blob of more than two axes is read as a matrix of so many rows.
    """
    weight, x = w.weights.get(call.weight), call.inputs[0]
    matrix = (rows, w.dims(x)[-1]) if rows and len(w.dims(x)) > 2 else w.dims(x)
    if weight is None or x not in w.rounded:
        return w.view(x, matrix), None, w.stored(call.weight, "weight")
    return w.integer_blob(x, matrix), weight, weight.integers


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
    bias = [] if call.bias is None else [w.stored(call.bias, "bias").reshape(-1)]
    parts = [tagged(value[channels]) if weight is None else integers(value[channels])]
    parts += [floats(vector[channels]) for vector in bias]
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
    """Writes a linear layer of vectors or of the rows of a matrix; more axes become rows before it."""
    x = call.inputs[0]
    w.place(x, -1)
    rows = prod(w.dims(x)[:-1])
    source, weight, value = _input(w, call, rows)
    params = {0: len(value), 1: int(call.bias is not None), 2: value.size}
    if weight is not None:
        params[8] = 2
    parts, dims = _parts(w, call, value, weight, slice(None)), w.dims(x)
    if len(dims) <= 2:
        w.emit("InnerProduct", call, params, parts, [source], everywhere=True)
        return
    result = w.layer("InnerProduct", [source], w.fresh(call.out.name), params, parts)
    w.put(call.out, result, (rows, len(value)))


def _matmul(w: NcnnWriter, call: OpCall) -> None:
    """Multiplies matrices, or stacks of them, of as many axes on both sides."""
    x, y = call.inputs
    ranks = [len(node.shape) for node in (x, y)]
    if min(ranks) < 2:
        raise ExportError("ncnn multiplies matrices: give vectors another axis, of size 1")
    for node, flip, inner in ((x, call.attrs["transpose_a"], -1), (y, call.attrs["transpose_b"], -2)):
        axis = (-3 - inner if flip else inner) % len(node.shape)
        if w.samples.holds(node, axis):
            raise ExportError("it sums over the batch, which ncnn does not see: use another axis")
    out = w.dims(call.out)
    axes = max(2, *(len(w.dims(node)) for node in (x, y)), len(out))
    if axes > 4:
        raise ExportError("ncnn multiplies stacks of matrices with 4 axes at most: join some axes")
    blobs = []
    for node in (x, y):
        shape = [1] * max(ranks) + [int(n) for n in node.shape]
        blobs.append(w.view(node, shape[-axes:]))
    if call.attrs["transpose_a"]:
        # 1: the last two axes, whatever is before them.
        blobs[0] = w.layer("Permute", [blobs[0]], w.fresh(call.out.name), {0: 1})
    flipped = int(call.attrs["transpose_b"])
    result = [1] * axes + [int(n) for n in call.out.shape]
    top = call.out.name if tuple(result[-axes:]) == out else w.fresh(call.out.name)
    w.put(call.out, w.layer("MatMul", blobs, top, {0: flipped}), result[-axes:])


def _float_conv(w: NcnnWriter, call: OpCall) -> None:
    """Writes a convolution of sequences or of volumes, in float."""
    groups, axes = call.attrs.get("groups", 1), len(call.attrs["stride"])
    value = w.stored(call.weight, "weight")
    value = value.reshape(-1, *value.shape[-axes - 1 :])
    params: dict[int, Any] = {0: len(value)}
    for place in range(axes):  # width, height, depth
        params[1 + 10 * place] = value.shape[-1 - place]
        for key, name in ((2, "dilation"), (3, "stride"), (4, "padding")):
            params[key + 10 * place] = call.attrs[name][-1 - place]
    params.update({5: int(call.bias is not None), 6: value.size})
    if groups > 1:
        params[7] = groups
    w.shape(call.inputs[0])
    kind = f"Convolution{'DepthWise' if groups > 1 else ''}{axes}D"
    w.emit(kind, call, params, _parts(w, call, value, None, slice(None)))


def _embedding(w: NcnnWriter, call: OpCall) -> None:
    """Looks up rows of a table; ncnn reads the bits of its input as integers."""
    table = call.attrs["weight"]
    stored = w.stored(table, "weight") if isinstance(table, TensorNode) else table.numpy()
    look_up(w, call, call.attrs["index"], stored)


# What an input of ids may be read by besides look-ups, and what may stand between them.
_RESHAPES = ("reshape", "flatten", "expand_dims", "squeeze")


def look_up(w: NcnnWriter, call: OpCall, index: TensorNode, table: np.ndarray) -> None:
    """Writes the rows of a table at the ids that an input of the graph holds.

    Nothing may stand between the two in the file: on ARM, ncnn turns what a Reshape reads into 16-bit floats.
    """
    while index not in w.names:
        reshape = None if index.expr is None else read(index.expr)
        if reshape is None or reshape.kind not in _RESHAPES:
            raise ExportError("its ids are computed, and ncnn looks up only an input: make them an input")
        (index,) = reshape.inputs
    dims = w.dims(index)
    if np.dtype(index.dtype).kind not in "iu" or len(dims) != 1:
        raise ExportError(
            f"{index.name} has {len(dims)} axes of {np.dtype(index.dtype).name} in a sample: ncnn reads "
            "one axis of integers: give it so"
        )
    if not _holds_ids(index):
        raise ExportError(
            f"{index.name} is read by other ops, too, and ncnn reads an embedding's input as integers, any "
            "other one as floats: give the module two inputs"
        )
    value = np.asarray(table, np.float32).reshape(len(table), -1)
    params = {0: value.shape[1], 1: value.shape[0], 2: 0, 3: value.size}
    blob = w.layer("Embed", [w.names[index]], w.fresh(call.out.name), params, [tagged(value)])
    w.put(call.out, blob, (*dims, value.shape[1]))


def _holds_ids(node: TensorNode) -> bool:
    """Returns whether all readers of an input look up by it, or read its shape."""
    return all(
        call is not None
        and (
            call.kind in ("embedding", "shape")
            or (call.kind == "getitem" and call.attrs["index"] is node)
            or (call.kind in _RESHAPES and all(_holds_ids(n) for n in call.outputs))
        )
        for call in map(read, users(node))
    )


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


_MODES = ("", "nearest", "bilinear", "bicubic")  # in the order of ncnn's numbers


def _interpolate(w: NcnnWriter, call: OpCall) -> None:
    a = call.attrs
    mode = "bilinear" if a["mode"] == "linear" else a["mode"]
    if mode not in _MODES or len(call.out.shape) != 4:
        raise ExportError(f"ncnn lacks interpolate in mode {a['mode']!r}: use nearest, bilinear or bicubic")
    height, width = w.shape(call.out)[-2:]
    w.emit("Interp", call, {0: _MODES.index(mode), 3: height, 4: width, 6: int(a["align_corners"])})


LAYERS: dict[str, Emitter] = {
    "conv2d": _conv,
    "conv_transpose2d": _transposed,
    **dict.fromkeys(("conv1d", "conv3d"), _float_conv),
    "linear": _linear,
    "matmul": _matmul,
    "embedding": _embedding,
    "max_pool2d": _pool(0),
    "avg_pool2d": _pool(1),
    "adaptive_max_pool2d": _adaptive(0),
    "adaptive_avg_pool2d": _adaptive(1),
    "interpolate": _interpolate,
}


def _softmax(w: NcnnWriter, call: OpCall) -> None:
    if len(call.attrs["axis"]) > 1:
        raise ExportError("ncnn lacks softmax over several axes: join them before it")
    (axis,) = call.attrs["axis"]
    w.emit("Softmax", call, {0: w.place(call.inputs[0], axis), 1: 1}, everywhere=True)


def _batch_norm(w: NcnnWriter, call: OpCall) -> None:
    parameters = w.batch_norm(call)
    mean = parameters["running_mean"]
    assert mean is not None
    defaults = {"weight": np.ones_like(mean), "bias": np.zeros_like(mean)}
    names = ("weight", "running_mean", "running_var", "bias")
    vectors = [defaults[n] if parameters[n] is None else parameters[n] for n in names]
    w.emit("BatchNorm", call, {0: mean.size, 1: float(call.attrs["eps"])}, [floats(v) for v in vectors])


def _parameter(w: NcnnWriter, value: Any, name: str) -> np.ndarray | None:
    """Returns the weight or the bias of a norm as a vector; None if there is none."""
    if value is None:
        return None
    stored = w.stored(value, name) if isinstance(value, TensorNode) else value.numpy()
    return np.asarray(stored, np.float32).reshape(-1)


def _affine(w: NcnnWriter, call: OpCall, size: int) -> list[bytes]:
    """Returns weight and bias of a norm of ``size`` values or channels; [] if it has neither."""
    factor, shift = (_parameter(w, call.attrs[n], n) for n in ("weight", "bias"))
    if factor is None and shift is None:
        return []
    factor = np.ones(size, np.float32) if factor is None else factor
    shift = np.zeros(size, np.float32) if shift is None else shift
    return [floats(factor), floats(shift)]


def _by_rows(
    w: NcnnWriter, call: OpCall, kind: str, params: dict[int, Any], parts: Sequence[bytes], size: int
) -> None:
    """Writes a norm over the last ``size`` values, which are one axis of the blob."""
    x, dims = call.inputs[0], w.dims(call.out)
    shape = [int(n) for n in x.shape]
    inside = next(k for k in range(1, len(shape) + 1) if prod(shape[-k:]) == size)
    for axis in range(len(shape) - inside, len(shape)):
        w.place(x, axis)
    rows = dims if dims[-1] == size else (max(prod(shape) // size, 1), size)
    top = call.out.name if rows == dims else w.fresh(call.out.name)
    w.put(call.out, w.layer(kind, [w.view(x, rows)], top, params, parts), rows)


def _layer_norm(w: NcnnWriter, call: OpCall) -> None:
    shape, x = call.attrs.get("normalized_shape"), call.inputs[0]
    if shape is None:
        size = prod(int(n) for n in x.shape[len(x.shape) - int(call.attrs["normalized_dim"]) :])
    else:
        size = int(np.prod(shape))
    parts = _affine(w, call, size)
    params = {0: size, 1: float(call.attrs["eps"]), 2: int(bool(parts))}
    _by_rows(w, call, "LayerNorm", params, parts, size)


def _rms_norm(w: NcnnWriter, call: OpCall) -> None:
    x = call.inputs[0]
    if call.attrs["axis"] % len(x.shape) != len(x.shape) - 1:
        raise ExportError("ncnn has RMSNorm over the last axis: transpose before it")
    size = int(x.shape[-1])
    factor = _parameter(w, call.attrs["weight"], "weight")
    parts = [] if factor is None else [floats(np.broadcast_to(factor, (size,)))]
    params = {0: size, 1: float(call.attrs["eps"]), 2: int(bool(parts))}
    _by_rows(w, call, "RMSNorm", params, parts, size)


def _group_norm(w: NcnnWriter, call: OpCall) -> None:
    channels, *sizes = w.shape(call.inputs[0])
    dims = (channels, *sizes) if len(sizes) == 2 else (channels, 1, prod(sizes))
    parts = _affine(w, call, channels)
    eps, affine = float(call.attrs["eps"]), int(bool(parts))
    kind, params = "InstanceNorm", {0: channels, 1: eps, 2: affine}
    if call.kind == "group_norm":
        groups = call.attrs.get("num_groups", call.attrs.get("group"))
        kind, params = "GroupNorm", {0: int(groups), 1: channels, 2: eps, 3: affine}
    top = call.out.name if dims == w.dims(call.out) else w.fresh(call.out.name)
    w.put(call.out, w.layer(kind, [w.view(call.inputs[0], dims)], top, params, parts), dims)


NORMS: dict[str, Emitter] = {
    "softmax": _softmax,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "instance_norm": _group_norm,
}
