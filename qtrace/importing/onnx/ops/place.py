"""Ops that write numbers at places, and that read an image between its pixels."""

from __future__ import annotations

import math
from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.values import Stored

__all__ = ["LOWERINGS"]


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
    sizes = np.array(shape[:depth])
    places = np.where(index < 0, index + sizes, index)
    if (places < 0).any() or (places >= sizes).any():
        call.contradict("writes to places that its data do not have")
    inner = math.prod(shape[depth:])
    first = np.ravel_multi_index(tuple(np.moveaxis(places, -1, 0)), shape[:depth]) * inner
    return _scattered(call, shape, first.reshape(-1, 1) + np.arange(inner))


def _fixed_shape(call: Call) -> tuple[int, ...]:
    if call.attribute("reduction", "none") != "none":
        call.refuse(f"has the reduction {call.attribute('reduction')!r}: MegEngine writes, and does not add")
    for index in (0, 2):
        call.refuse_open(index, None, "writes to places of an input")
    return call.shape(0)


def _places(call: Call, size: int) -> np.ndarray:
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
    "ScatterElements": _scatter_elements,
    "Scatter": _scatter_elements,
    "ScatterND": _scatter_nd,
    "OneHot": _one_hot,
    "GridSample": _grid_sample,
}
