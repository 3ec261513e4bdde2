"""Ops that pick numbers or write them by index, searches, and reading an image between its pixels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.model import Stored


def _gather(call: Call) -> Any:
    rank = call.rank(0)
    axis = call.axis(call.attribute("axis", 0), rank)
    index = call.values[1]
    if isinstance(index, Stored):
        return _gather_stored(call, axis, index.array)
    picked = call.tensor(1)
    return call.method("__getitem__", call.tensor(0), (*[slice(None)] * axis, picked))


def _gather_stored(call: Call, axis: int, index: np.ndarray) -> Any:
    sizes = [shape[axis] for shape in call.shapes(0)]
    if len(set(sizes)) > 1 and (index < 0).any():
        if index.ndim == 0:
            return call.method("__getitem__", call.tensor(0), (*[slice(None)] * axis, int(index)))
        call.refuse("picks places of an open axis from its end")
    places = np.where(index < 0, index + sizes[0], index)
    if places.size == 0 or places.min() < 0 or places.max() >= min(sizes):
        call.refuse("picks places that its input does not have, or none")
    before = [slice(None)] * axis
    if places.ndim == 0:
        return call.method("__getitem__", call.tensor(0), (*before, int(places)))
    flat = places.reshape(-1)
    step = int(flat[1] - flat[0]) if flat.size > 1 else 1
    if places.ndim == 1 and step > 0 and np.array_equal(flat, flat[0] + step * np.arange(flat.size)):
        part = slice(int(flat[0]), int(flat[-1]) + 1, step)
        return call.method("__getitem__", call.tensor(0), (*before, part))
    stored = Stored(places.astype(np.int32), f"{call.name}_index")
    return call.method("__getitem__", call.tensor(0), (*before, call.layers.tensor(stored)))


def _gather_elements(call: Call) -> Any:
    """Picks from the flattened input at stored offsets plus the index times the stride of its axis.

    MegEngine's gather computes its offsets while it runs, with a kernel that races.
    """
    axis = call.axis(call.attribute("axis", 0), call.rank(0))
    own, picked = call.shape(0), call.shape(1)
    for position in (0, 1):
        call.refuse_open(position, None, "picks by place from an input")
    stride = math.prod(own[axis + 1 :])
    grid = np.indices(picked, sparse=True)
    offsets = sum(grid[i] * math.prod(own[i + 1 :]) for i in range(len(own)) if i != axis)
    offsets = np.array(np.broadcast_to(np.asarray(offsets, np.int32), picked))
    flat = call.function(F.flatten, call.tensor(0)) if len(own) > 1 else call.tensor(0)
    if isinstance(call.values[1], Stored):
        index = call.array(1)
        places = np.where(index < 0, index + own[axis], index) * stride + offsets
        node = call.layers.tensor(Stored(places.astype(np.int32), f"{call.name}_places"))
        return call.method("__getitem__", flat, node)
    node = call.tensor(1)
    wrapped = call.function(F.add, node, own[axis])
    node = call.function(F.where, call.function(F.less, node, 0), wrapped, node)
    if stride > 1:
        node = call.function(F.mul, node, stride)
    if len(own) > 1:
        node = call.function(F.add, node, call.layers.tensor(Stored(offsets, f"{call.name}_offsets")))
    return call.method("__getitem__", flat, node)


def _gather_nd(call: Call) -> Any:
    """Picks rows of the input whose first axes are one, by a stored index."""
    index = call.array(1)
    depth = index.shape[-1] if index.ndim else 0
    if call.attribute("batch_dims", 0):
        call.refuse("picks other places in each row of its batch (batch_dims)")
    if not 1 <= depth <= call.rank(0) or index.size == 0:
        call.contradict(f"has an index of the shape {list(index.shape)} for {call.rank(0)} axes")
    call.refuse_open(0, range(depth), "picks places of an input")
    own = call.shape(0)[:depth]
    places = np.where(index < 0, index + np.array(own), index)
    if (places < 0).any() or (places >= np.array(own)).any():
        call.contradict("picks places that its input does not have")
    flat = np.ravel_multi_index(tuple(np.moveaxis(places, -1, 0)), own).reshape(-1)
    rest = [call.layers.size(call.size(0, axis)) for axis in range(depth, call.rank(0))]
    node = call.tensor(0)
    if depth > 1:
        node = call.function(F.reshape, node, (math.prod(own), *rest), name=f"{call.name}_rows")
    stored = Stored(flat.astype(np.int32), f"{call.name}_index")
    if index.ndim == 2:
        return call.method("__getitem__", node, call.layers.tensor(stored))
    picked = call.method("__getitem__", node, call.layers.tensor(stored), name=f"{call.name}_picked")
    return call.function(F.reshape, picked, (*index.shape[:-1], *rest) or (1,))


def _arg(function: Callable[..., Any]) -> Lowering:
    def lower(call: Call) -> Any:
        rank = call.rank(0)
        axis = call.axis(call.attribute("axis", 0), rank)
        keep = bool(call.attribute("keepdims", 1))
        if call.attribute("select_last_index", 0):
            call.refuse_open(0, [axis], "finds the last of the largest of an input")
            index = (*[slice(None)] * axis, slice(None, None, -1))
            turned = call.method("__getitem__", call.tensor(0), index)
            first = call.function(function, turned, axis=axis, keepdims=keep)
            last = call.function(F.neg, first)
            return call.function(F.add, last, call.shape(0)[axis] - 1)
        return call.function(function, call.tensor(0), axis=axis, keepdims=keep)

    return lower


def _cum_sum(call: Call) -> Any:
    axis = call.axis(int(call.scalar(1)), call.rank(0))
    exclusive, turned = call.attribute("exclusive", 0), call.attribute("reverse", 0)
    if call.dtype(0).name not in ("float32", "float16", "bfloat16", "int32", "int64"):
        call.refuse(f"sums {call.dtype(0).name}")
    back = (*[slice(None)] * axis, slice(None, None, -1))
    x = call.method("__getitem__", call.tensor(0), back) if turned else call.tensor(0)
    total = call.function(F.cumsum, x, axis)
    if exclusive:
        total = call.function(F.sub, total, x)
    return call.method("__getitem__", total, back) if turned else total


def _top_k(call: Call) -> Any:
    """Finds the largest in the rows of a matrix, the only form that MegEngine has."""
    rank = call.rank(0)
    axis = call.axis(call.attribute("axis", -1), rank)
    call.attribute("sorted", 1)  # an order is right where none is asked for
    if call.dtype(0) != np.float32:
        call.refuse(f"finds the largest of {call.dtype(0).name}: cast to float32 before it")
    count = int(call.scalar(1))
    options = {"descending": bool(call.attribute("largest", 1))}
    names = call.result_names
    if axis == rank - 1 and rank <= 2:
        return call.builder.call_function(F.topk, call.tensor(0), count, name=names, **options)
    order = list(range(rank))
    order[axis], order[-1] = order[-1], axis  # its own inverse
    *rows, last = [call.layers.size(call.size(0, a)) for a in order]
    opened = [a for a in order[:-1] if len({shape[a] for shape in call.shapes(0)}) > 1]
    if len(opened) == 1:  # follows from the number of values
        rows[order.index(opened[0])] = -1
    x = call.tensor(0)
    if axis != rank - 1:
        x = call.function(F.transpose, x, tuple(order), name=f"{call.name}_turned")
    if rank > 2:
        x = call.function(F.reshape, x, (-1, last), name=f"{call.name}_rows")
    names = [f"{name}_of_rows" for name in names]
    results = call.builder.call_function(F.topk, x, count, name=names, **options)
    if rank > 2:
        results = [call.function(F.reshape, node, (*rows, count), name=f"{node.name}_") for node in results]
    if axis != rank - 1:
        results = [call.function(F.transpose, node, tuple(order), name=f"{node.name}_") for node in results]
    return tuple(results)


def _scatter_elements(call: Call) -> Any:
    """Reads the shape of the data, with the update at each place that the stored index names."""
    axis = call.axis(call.attribute("axis", 0), call.rank(0))
    shape = _fixed_shape(call)
    index = _places(call, shape[axis])
    if index.ndim != len(shape) or any(i > n for i, n in zip(index.shape, shape, strict=True) if n != i):
        call.refuse(
            f"has an index of the shape {list(index.shape)}, which does not fit its data {list(shape)}"
        )
    grid = list(np.indices(index.shape, sparse=True))
    grid[axis] = index
    return _scattered(call, shape, np.ravel_multi_index(tuple(np.broadcast_arrays(*grid)), shape))


def _scatter_nd(call: Call) -> Any:
    """As `_scatter_elements`, with rows of indices that name a place or a part of the data."""
    shape, index = _fixed_shape(call), call.array(1)
    depth = index.shape[-1] if index.ndim else 0
    if not 1 <= depth <= len(shape):
        call.contradict(f"has an index of the shape {list(index.shape)} for data of the shape {list(shape)}")
    places = _places(call, np.array(shape[:depth]))
    inner = math.prod(shape[depth:])
    first = np.ravel_multi_index(tuple(np.moveaxis(places, -1, 0)), shape[:depth]) * inner
    return _scattered(call, shape, first.reshape(-1, 1) + np.arange(inner))


def _fixed_shape(call: Call) -> tuple[int, ...]:
    if call.attribute("reduction", "none") != "none":
        call.refuse(f"has the reduction {call.attribute('reduction')!r}: MegEngine writes, and does not add")
    for index in (0, 2):
        call.refuse_open(index, None, "writes to places of an input")
    return call.shape(0)


def _places(call: Call, size: int | np.ndarray) -> np.ndarray:
    index = call.array(1)
    places = np.where(index < 0, index + size, index)
    if (places < 0).any() or (places >= size).any():
        call.contradict("writes to places that its data do not have")
    return places


def _scattered(call: Call, shape: tuple[int, ...], places: np.ndarray) -> Any:
    """Picks each number of the result from the data or from the updates, which stand after them."""
    flat, count = places.reshape(-1), math.prod(shape)
    if math.prod(call.shape(2)) != flat.size:
        call.contradict(f"has {math.prod(call.shape(2))} updates for {flat.size} places")
    if flat.size == 0:
        return call.tensor(0)
    sources = np.arange(count)
    sources[flat] = count + np.arange(flat.size)
    parts = [call.function(F.reshape, call.tensor(i), (-1,), name=f"{call.name}_{i}") for i in (0, 2)]
    both = call.function(F.concat, parts, 0, name=f"{call.name}_both")
    stored = Stored(sources.astype(np.int32), f"{call.name}_sources")
    picked = call.method("__getitem__", both, call.layers.tensor(stored), name=f"{call.name}_picked")
    return call.function(F.reshape, picked, shape)


def _one_hot(call: Call) -> Any:
    depth, values = int(call.scalar(1)), call.array(2)
    kinds = (call.dtype(0), values.dtype)
    if values.shape != (2,) or depth < 1 or any(k not in (np.float32, np.int32, np.int64) for k in kinds):
        call.refuse(f"marks {kinds[0].name} by {kinds[1].name} of the shape {list(values.shape)}")
    rank = call.rank(0) + 1
    axis = call.axis(call.attribute("axis", -1), rank)
    off, on = values
    if values.dtype.kind == "f" and np.float32(on - off) + off != on:
        call.refuse(f"marks places by {on:g} instead of {off:g}, which float32 cannot add")
    index = call.function(F.expand_dims, call.tensor(0), axis, name=f"{call.name}_index")
    shape = [depth if i == axis else 1 for i in range(rank)]
    kind = np.float32 if kinds[0].kind == "f" else np.int32
    # An index counts from the end if it is negative; one beyond the depth marks no place.
    rows = [np.arange(depth, dtype=kind).reshape(shape) + first for first in (0, -depth)]
    names = (f"{call.name}_places", f"{call.name}_places_from_the_end")
    marks = [
        call.function(F.equal, index, call.layers.tensor(Stored(row.astype(kind), name)), name=f"{name}_hit")
        for row, name in zip(rows, names, strict=True)
    ]
    hit = call.function(F.logical_or, *marks, name=f"{call.name}_hit")
    result = call.method("astype", hit, "float32" if values.dtype.kind == "f" else "int32")
    number = float if values.dtype.kind == "f" else int
    if on - off != 1:
        result = call.function(F.mul, result, number(on - off))
    return call.function(F.add, result, number(off)) if off != 0 else result


# ONNX's padding -> MegEngine's border.
_BORDERS = {"zeros": "constant", "border": "replicate"}


def _grid_sample(call: Call) -> Any:
    """Computes the pixels that the grid names, from -1 to 1 along each axis, and samples there."""
    mode, padding = call.attribute("mode", "linear"), call.attribute("padding_mode", "zeros")
    aligned = bool(call.attribute("align_corners", 0))
    if call.rank(0) != 4 or not call.is_float(0):
        call.refuse(f"samples {call.dtype(0).name} with {call.rank(0)} axes; MegEngine samples images")
    if mode not in ("linear", "bilinear") or padding not in _BORDERS:
        call.refuse(f"has mode {mode!r} and padding_mode {padding!r}, which MegEngine computes otherwise")
    call.refuse_open(0, [2, 3], "samples an input")
    high, wide = call.shape(0)[2:]
    sizes = np.array([wide, high], np.float32)
    factor, shift = ((sizes - 1) / 2, (sizes - 1) / 2) if aligned else (sizes / 2, (sizes - 1) / 2)
    stored = [
        call.layers.tensor(Stored(v.astype(np.float32), f"{call.name}_{n}"))
        for n, v in (("factor", factor), ("shift", shift))
    ]
    places = call.function(F.mul, call.tensor(1), stored[0], name=f"{call.name}_scaled")
    places = call.function(F.add, places, stored[1], name=f"{call.name}_places")
    return call.function(F.vision.remap, call.tensor(0), places, border_mode=_BORDERS[padding])


LOWERINGS: dict[str, Lowering] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ArgMax": _arg(F.argmax),
    "ArgMin": _arg(F.argmin),
    "CumSum": _cum_sum,
    "TopK": _top_k,
    "ScatterElements": _scatter_elements,
    "Scatter": _scatter_elements,
    "ScatterND": _scatter_nd,
    "OneHot": _one_hot,
    "GridSample": _grid_sample,
}
