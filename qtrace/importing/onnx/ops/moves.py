"""Ops that move numbers, and that change shapes and types."""

from __future__ import annotations

import itertools
import math
from typing import Any

import megengine.functional as F
import numpy as np
import onnx

from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.folding import Number, Size, arithmetic, product, value_at, whole
from qtrace.importing.onnx.model import Computed, Stored, is_float

_NOTHING = slice(0, 0)
_LAST = int(np.iinfo(np.int32).max)  # a place from here on means the end of the axis
_MAX_SECTIONS = 500  # of unlike sizes: MegEngine's time and memory grow with their square


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


def _count(call: Call) -> Any:
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


def _transpose(call: Call) -> Any:
    rank = call.rank(0)
    order = call.ints("perm", list(reversed(range(rank))))
    if sorted(order) != list(range(rank)):
        call.contradict(f"has the order {order} for {rank} axes")
    return call.function(F.transpose, call.tensor(0), tuple(order)) if rank > 1 else call.tensor(0)


def _concat(call: Call) -> Any:
    axis = call.axis(call.attribute("axis", 1), call.rank(0))
    tensors = [call.tensor(i) for i in range(len(call.values)) if 0 not in call.shape(i)]
    return call.function(F.concat, tensors, axis=axis) if len(tensors) > 1 else tensors[0]


def _split(call: Call) -> Any:
    axis = call.axis(call.attribute("axis", 0), call.rank(0))
    total, count = call.shape(0)[axis], len(call.node.outputs)
    parts = call.ints(1, None)
    declared = call.attribute("num_outputs", None)
    if parts is None:
        size = -(-total // (declared or count))
        parts = [min(size, total - size * i) for i in range(count)]
    if sum(parts) != total or len(parts) != count or min(parts) < 0:
        call.contradict(f"splits an axis of size {total} into {parts}")
    call.refuse_open(0, [axis], "splits an input")
    filled = [i for i, size in enumerate(parts) if size]
    result_names = call.result_names
    names = [result_names[i] for i in filled]
    sections: int | list[int] = len(filled)
    if len({parts[i] for i in filled}) > 1:
        if len(filled) > _MAX_SECTIONS:
            call.refuse(f"splits an input into {len(filled)} parts of several sizes")
        sections = list(itertools.accumulate(parts[i] for i in filled))[:-1]
    if len(filled) == 1:
        split = [call.tensor(0)]
    else:
        split = call.builder.call_function(F.split, call.tensor(0), sections, axis=axis, name=names)
    computed = dict(zip(filled, split, strict=True))
    return [computed[i] if i in computed else _empty(call, axis) for i in range(count)]


def _empty(call: Call, axis: int) -> Stored:
    """Returns the part of the first input without elements along an axis.

    Raises:
        Refusal: when another axis is open.
    """
    call.refuse_open(0, [i for i in range(call.rank(0)) if i != axis], "takes nothing of an input")
    shape = [0 if i == axis else size for i, size in enumerate(call.shape(0))]
    return Stored(np.empty(shape, call.dtype(0)), f"{call.name}_empty")


def _slice(call: Call) -> Any:
    rank = call.rank(0)
    starts, ends = call.sizes(1), call.sizes(2)
    axes, steps = call.ints(3, list(range(len(starts)))), call.ints(4, [1] * len(starts))
    index: list[Any] = [slice(None)] * rank
    cut: list[Any] = [slice(None)] * rank
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        position = call.axis(axis, rank)
        place = _place_to_walk_back_from(call, (start, end), step, position)
        if place is not None:  # it may lie after the end of a shorter axis, which ONNX walks back from then
            cut[position], start = slice(0, place + 1), _LAST
        index[position] = _range(call, (start, end), step, position)
    if _NOTHING in index:
        return _empty(call, index.index(_NOTHING))
    x = call.tensor(0)
    for part in (cut, index):
        if any(places != slice(None) for places in part):
            x = call.method("__getitem__", x, tuple(part))
    return x


def _place_to_walk_back_from(
    call: Call, ends: tuple[int | Size, int | Size], step: int, axis: int
) -> int | None:
    """Returns the place, counted from its begin, from which a slice goes back on an open axis; None without.

    Raises:
        Refusal: when it ends at a place that is counted from the end of the axis, which is not cut there.
    """
    start, end = ends
    if step >= 0 or isinstance(start, Size) or isinstance(end, Size):
        return None
    if len({shape[axis] for shape in call.shapes(0)}) == 1 or not 0 <= start < _LAST:
        return None
    if -_LAST < end < 0:
        call.refuse("walks back between places that are counted from both ends of an open axis")
    return start


def _range(call: Call, ends: tuple[int | Size, int | Size], step: int, axis: int) -> slice:
    """Returns the part of an axis as a Python slice that holds for all sizes of open axes."""
    sizes = [shape[axis] for shape in call.shapes(0)]
    if step == 0:
        call.contradict("has the step 0")
    start, end = ends
    if isinstance(start, Size) or isinstance(end, Size):
        return _computed_range(call, ends, step, axis)
    if len(set(sizes)) > 1:
        whole = step == 1 and start == 0 and end >= _LAST
        if whole:
            return slice(None)
        if step < 0 and start >= _LAST:
            return slice(None, end if abs(end) < _LAST else None, step)
        bounds = [slice(start, end, step).indices(size) for size in sizes]
        if start < 0 or len(set(bounds)) > 1:
            return slice(start, end if abs(end) < _LAST else None, step)
        return slice(*bounds[0])
    first, last, step = slice(start, end, step).indices(sizes[0])
    if (first, last, step) == (0, sizes[0], 1):
        return slice(None)
    if len(range(first, last, step)) == 0:
        return _NOTHING
    return slice(first, None if last < 0 else last, step)


def _computed_range(call: Call, ends: tuple[int | Size, int | Size], step: int, axis: int) -> slice:
    """Returns a part whose ends the graph computes; the whole axis stays as it is."""
    start, end = ends
    own = call.size(0, axis)
    if isinstance(end, Size) and isinstance(own, Size) and end.op == own.op and end.parts == own.parts:
        end = _LAST if step > 0 else end
        if start == 0 and step == 1:
            return slice(None)
    if step < 0:
        call.refuse("walks back between places that depend on an open axis")
    # An end beyond the axis means its last place in both; a negative one counts from the last place.
    probes = range(len(call.shapes(0)))
    if any(value_at(place, probe) < 0 for place in ends for probe in probes if isinstance(place, Size)):
        call.refuse("slices at places before the first one that depend on an open axis")
    first, last = call.layers.size(start), None if end == _LAST else call.layers.size(end)
    return slice(first, last, step)


def _pad(call: Call) -> Any:
    rank, mode = call.rank(0), call.attribute("mode", "constant")
    pads, value = call.ints(1), call.scalar(2, 0)
    axes = [call.axis(a, rank) for a in call.ints(3, list(range(rank)))]
    widths = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        widths[axis] = (pads[i], pads[i + len(axes)])
    x = call.tensor(0)
    if any(n < 0 for pair in widths for n in pair):
        cut = [
            slice(max(-b, 0), size - max(-a, 0)) for (b, a), size in zip(widths, call.shape(0), strict=True)
        ]
        call.refuse_open(0, None, "has negative pads for an input")
        if mode != "constant":
            call.refuse("has negative pads with this mode")
        x = call.method("__getitem__", x, tuple(cut))
        widths = [(max(b, 0), max(a, 0)) for b, a in widths]
    if not any(n for pair in widths for n in pair):
        return x
    if mode not in ("constant", "reflect", "edge"):
        call.refuse(f"pads in the mode {mode!r}, which MegEngine lacks")
    if mode == "reflect" and any(max(pair) >= n for pair, n in zip(widths, call.shape(0), strict=True)):
        call.refuse("reflects more than the tensor holds")
    if not call.is_float(0):
        call.refuse(f"pads {call.dtype(0).name}; MegEngine pads float32")
    names = {"constant": "constant", "reflect": "reflect", "edge": "replicate"}
    return call.function(F.nn.pad, x, tuple(widths), names[mode], float(value))


def _triangle(call: Call) -> Any:
    """Keeps the upper or lower triangle of the last two axes, and sets the rest to 0."""
    upper, offset = bool(call.attribute("upper", 1)), int(call.scalar(1, 0))
    if len({shape[-2:] for shape in call.shapes(0)}) > 1:
        mask = _open_triangle(call, upper, offset)
    else:
        ones = np.ones(call.shape(0)[-2:], bool)
        triangle = np.triu(ones, offset) if upper else np.tril(ones, offset)
        shape = (1,) * (call.rank(0) - 2) + triangle.shape
        mask = call.layers.tensor(Stored(triangle.reshape(shape), f"{call.name}_mask"))
    x = call.tensor(0)
    if call.dtype(0) == np.bool_:
        return call.function(F.logical_and, x, mask)
    zeros = call.function(F.zeros_like, x)
    sizes = [call.size(0, axis) for axis in range(call.rank(0))]
    return call.function(F.where, call.expanded(mask, sizes, call.shapes(0)), x, zeros)


def _open_triangle(call: Call, upper: bool, offset: int) -> Any:
    """Compares the places of rows and columns, whose numbers depend on open axes."""
    rank = call.rank(0)
    places = []
    for axis in (rank - 2, rank - 1):
        count = call.layers.size(call.size(0, axis))
        own = call.function(F.arange, 0, count, 1, dtype="int32")
        shape = [-1 if place == axis else 1 for place in range(rank)]
        places.append(call.function(F.reshape, own, tuple(shape)))
    rows, columns = places
    compare = F.greater_equal if upper else F.less_equal
    return call.function(compare, columns, call.function(F.add, rows, offset), name=f"{call.name}_mask")


def _depth_to_space(call: Call) -> Any:
    block, mode = call.attribute("blocksize"), call.attribute("mode", "DCR")
    call.refuse_open(0, [1], "divides the channels of an input")
    channels = call.shape(0)[1]
    height, width, taller, wider = _image_sizes(call, "Mul", block)
    rest = channels // block**2
    if mode == "CRD":
        return call.function(F.nn.pixel_shuffle, call.tensor(0), block)
    parts = call.function(F.reshape, call.tensor(0), (-1, block, block, rest, height, width))
    moved = call.function(F.transpose, parts, (0, 3, 4, 1, 5, 2))
    return call.function(F.reshape, moved, (-1, rest, taller, wider))


def _image_sizes(call: Call, op: str, block: int) -> list[Any]:
    """Returns height and width of an image as arguments, and both multiplied or divided by ``block``."""
    sizes: list[Number] = [call.size(0, 2), call.size(0, 3)]
    changed = [arithmetic(op, size, block, True) for size in sizes]
    return [call.layers.size(size) for size in (*sizes, *changed)]


def _space_to_depth(call: Call) -> Any:
    block = call.attribute("blocksize")
    call.refuse_open(0, [1], "joins the channels of an input")
    channels = call.shape(0)[1]
    _, _, rows, columns = _image_sizes(call, "Div", block)
    parts = call.function(F.reshape, call.tensor(0), (-1, channels, rows, block, columns, block))
    moved = call.function(F.transpose, parts, (0, 3, 5, 1, 2, 4))
    return call.function(F.reshape, moved, (-1, channels * block**2, rows, columns))


LOWERINGS: dict[str, Lowering] = {
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Tile": _tile,
    "Range": _count,
    "ConstantOfShape": _constant_of_shape,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Transpose": _transpose,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "DepthToSpace": _depth_to_space,
    "Trilu": _triangle,
    "SpaceToDepth": _space_to_depth,
}
