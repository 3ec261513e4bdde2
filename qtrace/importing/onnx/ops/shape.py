"""Ops that change shapes and types."""

from __future__ import annotations

import math
from typing import Any

import megengine.functional as F
import numpy as np
import onnx

from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.sizes.folding import product
from qtrace.importing.onnx.sizes.size import Size, value_at, whole
from qtrace.importing.onnx.values import Computed, Stored, is_float

__all__ = ["LOWERINGS"]


def _reshape(call: Call) -> Any:
    target = call.sizes(1)
    if not call.attribute("allowzero", 0):
        target = [call.size(0, axis) if size == 0 else size for axis, size in enumerate(target)]
    if 0 in target:
        call.refuse("gives an empty tensor, which MegEngine cannot compute with")
    return _reshaped(call, target)


def _reshaped(call: Call, target: list[int | Size]) -> Any:
    """Reshapes input 0; one open size is left to MegEngine as -1."""
    if -1 in target:
        place = target.index(-1)
        sizes = []
        for probe, shape in enumerate(call.shapes(0)):
            others = [int(value_at(n, probe)) for i, n in enumerate(target) if i != place]
            sizes.append(math.prod(shape) // max(math.prod(others), 1))
        if len(set(sizes)) == 1:
            target = [sizes[0] if i == place else n for i, n in enumerate(target)]
    elif any(
        math.prod(int(value_at(n, probe)) for n in target) != math.prod(shape)
        for probe, shape in enumerate(call.shapes(0))
    ):
        call.contradict("gives a shape with another number of values than its input, at one size at least")
    opened = [i for i, size in enumerate(target) if isinstance(size, Size)]
    inferred = opened[0] if opened and -1 not in target else None
    arguments = [-1 if i == inferred else call.layers.size(size) for i, size in enumerate(target)]
    if tuple(arguments) == call.shape(0) and len(set(call.shapes(0))) == 1:
        return call.tensor(0)
    return call.function(F.reshape, call.tensor(0), tuple(arguments))


def _flatten(call: Call) -> Any:
    rank, axis = call.rank(0), call.attribute("axis", 1)
    axis = axis + rank if axis < 0 else axis
    if axis == 1 and rank >= 2:
        return call.function(F.flatten, call.tensor(0), 1)
    sizes = [call.size(0, i) for i in range(rank)]
    return _reshaped(call, [whole(product(sizes[:axis])), whole(product(sizes[axis:]))])


def _squeeze(call: Call) -> Any:
    shape = call.shape(0)
    axes = call.ints(1, None)
    if axes is None:
        axes = [i for i, n in enumerate(shape) if n == 1]
        call.refuse_open(0, axes, "drops every axis of size 1 of an input")
    axes = [call.axis(a, len(shape)) for a in axes]
    return call.function(F.squeeze, call.tensor(0), sorted(axes)) if axes else call.tensor(0)


def _unsqueeze(call: Call) -> Any:
    axes = call.ints(1)
    rank = call.rank(0) + len(axes)
    if rank > 7:
        call.refuse(f"gives {rank} axes; MegEngine's tensors have at most 7")
    places = sorted(call.axis(a, rank) for a in axes)
    return call.function(F.expand_dims, call.tensor(0), places if len(places) > 1 else places[0])


def _expand(call: Call) -> Any:
    target, own = call.sizes(1), [call.size(0, axis) for axis in range(call.rank(0))]
    rank = max(len(target), len(own))
    target = [*[1] * (rank - len(target)), *target]
    own = [*[1] * (rank - len(own)), *own]
    sizes: list[int | Size] = [b if a == 1 else a for a, b in zip(target, own, strict=True)]
    probes = max([len(call.shapes(0)), *(len(n.values) for n in sizes if isinstance(n, Size))])
    expanded = []
    for probe in range(probes):
        shapes = call.shapes(0)
        numbers = tuple(int(value_at(n, probe)) for n in target)
        try:
            expanded.append(np.broadcast_shapes(shapes[min(probe, len(shapes) - 1)], numbers))
        except ValueError:
            call.contradict("expands to a shape to which its input does not broadcast")
    return call.expanded(call.tensor(0), sizes, expanded, name=call.name)


def _tile(call: Call) -> Any:
    repeats = call.sizes(1)
    if all(n == 1 for n in repeats):
        return call.tensor(0)
    return call.function(F.tile, call.tensor(0), tuple(call.layers.size(n) for n in repeats))


def _range(call: Call) -> Any:
    """Counts up to a size that depends on an open axis; whole numbers in float32 are counted as integers."""
    kind = call.dtype(0).name
    if kind not in ("int64", "int32", "float32"):
        call.refuse(f"counts in {kind} up to a size of an open axis")
    start, stop, step = (call.layers.size(_one(call, i)) for i in range(3))
    places = call.function(F.arange, start, stop, step, dtype="int32")
    return call.method("astype", places, "float32") if kind == "float32" else places


def _one(call: Call, index: int) -> int | Size:
    value = call.values[index]
    if isinstance(value, Stored) and value.array.dtype.kind == "f":
        number = float(call.scalar(index))
        if not number.is_integer():
            call.refuse("counts in fractions up to a size of an open axis")
        return int(number)
    (size,) = call.sizes(index)
    return size


def _constant_of_shape(call: Call) -> Any:
    """Fills a tensor whose sizes depend on open axes."""
    value = call.attribute("value", None)
    array = np.zeros(1, np.float32) if value is None else onnx.numpy_helper.to_array(value)
    kind = {"float32": "float32", "int64": "int32", "int32": "int32"}.get(array.dtype.name)
    if kind is None:
        call.refuse(f"fills {array.dtype.name} in sizes of open axes")
    sizes = tuple(call.layers.size(n) for n in call.sizes(0))
    number = float(array.reshape(-1)[0]) if kind == "float32" else int(array.reshape(-1)[0])
    return Computed(call.function(F.full, sizes, number, dtype=kind), array.dtype)


_FLOATS = ("float32", "float16", "bfloat16", "float64")
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
        same = (
            value.learned and value.array.dtype == target
        )  # as torch's exporter writes a GroupNorm's weight
        return value if same else Stored(value.array.astype(target), call.name)
    return _converted(call, target)


def _converted(call: Call, target: np.dtype) -> Any:
    source = call.dtype(0)
    if target.name in _FLOATS:
        if source.name in _FLOATS:  # all are carried as float32
            return Computed(call.tensor(0), target)
        return call.method("astype", call.tensor(0), "float32")
    if target.name not in (*_INTEGERS, "int8", "uint8", "int16"):
        call.refuse(f"converts to {target.name}, which MegEngine lacks")
    if target.name == "bool":
        return call.function(F.not_equal, call.tensor(0), 0)
    if is_float(source) and target.itemsize < 4:
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
    "Range": _range,
    "ConstantOfShape": _constant_of_shape,
    "Cast": _cast,
    "CastLike": _cast_like,
}
