"""ncnn layers that normalise: BatchNorm, LayerNorm, GroupNorm, InstanceNorm, RMSNorm and softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall
from qtrace.targets.ncnn.writer import NcnnWriter, floats

__all__ = ["NORMS"]

Emitter = Callable[[NcnnWriter, OpCall], None]


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


def _channels(w: NcnnWriter, call: OpCall) -> tuple[list[int], tuple[int, ...]]:
    """Returns the shape of a sample, and the axes of the blob by which a norm by channels reads it."""
    shape = w.shape(call.inputs[0])
    return shape, (shape[0], 1, prod(shape[1:])) if len(shape) != 3 else tuple(shape)


def _group_norm(w: NcnnWriter, call: OpCall) -> None:
    (channels, *_), dims = _channels(w, call)
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
