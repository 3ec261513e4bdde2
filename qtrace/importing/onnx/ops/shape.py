"""Ops that change shapes and types."""

from __future__ import annotations

import math
from typing import Any

import megengine.functional as F
import numpy as np
import onnx

from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.values import BatchMultiple, Computed, Stored

__all__ = ["LOWERINGS"]


def _reshape(call: Call) -> Any:
    target = call.sizes(1) if call.version >= 5 else list(call.ints("shape"))
    keep_zero = bool(call.attribute("allowzero", 0))
    shapes = call.shapes(0)
    if not keep_zero:
        target = [
            call.batch_size(*(s[i] for s in (shapes[0], shapes[-1]))) if size == 0 else size
            for i, size in enumerate(target)
        ]
    if 0 in target:
        call.refuse("gives an empty tensor, which MegEngine cannot compute with")
    return _reshaped(call, target)


def _reshaped(call: Call, target: list[int | BatchMultiple]) -> Any:
    """Reshapes input 0; one size of the batch is left to MegEngine as -1."""
    if -1 in target:
        open_axis = target.index(-1)
        sizes = []
        for probe, shape in enumerate(call.shapes(0)):
            others = [_size(call, n, probe) for i, n in enumerate(target) if i != open_axis]
            sizes.append(math.prod(shape) // max(math.prod(others), 1))
        target = [call.batch_size(sizes[0], sizes[-1]) if i == open_axis else n for i, n in enumerate(target)]
    batches = [i for i, size in enumerate(target) if isinstance(size, BatchMultiple)]
    arguments = [call.layers.size(size) if i in batches[1:] else size for i, size in enumerate(target)]
    if batches:
        arguments[batches[0]] = -1
    if tuple(arguments) == call.shape(0) and not batches:
        return call.tensor(0)
    return call.function(F.reshape, call.tensor(0), tuple(arguments))


def _size(call: Call, size: int | BatchMultiple, probe: int) -> int:
    return size if isinstance(size, int) else size.recorded + probe * size.factor


def _flatten(call: Call) -> Any:
    rank, axis = call.rank(0), call.attribute("axis", 1)
    axis = axis + rank if axis < 0 else axis
    if axis == 1 and rank >= 2:
        return call.function(F.flatten, call.tensor(0), 1)
    shapes = call.shapes(0)
    sides = [(math.prod(s[:axis]), math.prod(s[axis:])) for s in (shapes[0], shapes[-1])]
    return _reshaped(call, [call.batch_size(a, b) for a, b in zip(*sides, strict=True)])


def _squeeze(call: Call) -> Any:
    shape = call.shape(0)
    axes = call.ints(1, None) if call.version >= 13 else call.ints("axes", None)
    if axes is None:
        axes = [i for i, n in enumerate(shape) if n == 1]
        if len(call.shapes(0)) > 1 and any(call.shapes(0)[1][i] != 1 for i in axes):
            call.refuse("drops every axis of size 1, which the batch may have: fix the batch")
    axes = [call.axis(a, len(shape)) for a in axes]
    return call.function(F.squeeze, call.tensor(0), sorted(axes)) if axes else call.tensor(0)


def _unsqueeze(call: Call) -> Any:
    axes = call.ints(1) if call.version >= 13 else call.ints("axes")
    rank = call.rank(0) + len(axes)
    if rank > 7:
        call.refuse(f"gives {rank} axes; MegEngine's tensors have at most 7")
    places = sorted(call.axis(a, rank) for a in axes)
    return call.function(F.expand_dims, call.tensor(0), places if len(places) > 1 else places[0])


def _expand(call: Call) -> Any:
    target = call.sizes(1)
    shapes = call.shapes(0)
    probes = max(len(shapes), 2 if any(isinstance(n, BatchMultiple) for n in target) else 1)
    expanded = []
    for probe in range(probes):
        own = shapes[min(probe, len(shapes) - 1)]
        try:
            expanded.append(np.broadcast_shapes(own, tuple(_size(call, n, probe) for n in target)))
        except ValueError:
            call.refuse("expands to a shape to which its input does not broadcast")
    return call.expanded(call.tensor(0), expanded, name=call.name)


def _tile(call: Call) -> Any:
    repeats = call.ints(1)
    return call.function(F.tile, call.tensor(0), tuple(repeats)) if set(repeats) != {1} else call.tensor(0)


_FLOATS = ("float32", "float16", "bfloat16")
_INTEGERS = ("int64", "int32", "bool")


def _cast(call: Call) -> Any:
    target = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(call.attribute("to")))
    call.attribute("saturate", 1)
    call.attribute("round_mode", "up")
    return _converted(call, target)


def _cast_like(call: Call) -> Any:
    call.attribute("saturate", 1)
    call.attribute("round_mode", "up")
    value, target = call.values[0], call.dtype(1)
    if isinstance(value, Stored) and target.name in (*_FLOATS, *_INTEGERS):
        return Stored(value.array.astype(target), call.name)
    return _converted(call, target)


def _converted(call: Call, target: np.dtype) -> Any:
    source = call.dtype(0)
    if target.name in _FLOATS:
        if target.name != "float32" and source.name == "float32":
            call.refuse(f"rounds to {target.name}, which MegEngine computes as float32")
        if source.name in _FLOATS:
            return Computed(call.tensor(0), np.dtype(np.float32))
        return call.method("astype", call.tensor(0), "float32")
    if target.name not in (*_INTEGERS, "int8", "uint8", "int16"):
        call.refuse(f"converts to {target.name}, which MegEngine has not")
    if target.name == "bool":
        return call.function(F.not_equal, call.tensor(0), 0)
    if source.kind == "f" and target.itemsize < 4:
        call.refuse(f"converts float32 to {target.name}, where numbers out of range have no defined result")
    carried = "int32" if target.name == "int64" else target.name
    if source.name in ("int64", "int32") and carried == "int32":
        return Computed(call.tensor(0), target)
    return call.method("astype", call.tensor(0), carried)


LOWERINGS: dict[str, Lowering] = {
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Tile": _tile,
    "Cast": _cast,
    "CastLike": _cast_like,
}
