"""Ops that move numbers: transposes, joins, slices, padding."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.values import Stored

__all__ = ["LOWERINGS"]


def _transpose(call: Call) -> Any:
    rank = call.rank(0)
    order = call.ints("perm", list(reversed(range(rank))))
    if sorted(order) != list(range(rank)):
        call.refuse(f"has the order {order} for {rank} axes")
    return call.function(F.transpose, call.tensor(0), tuple(order)) if rank > 1 else call.tensor(0)


def _concat(call: Call) -> Any:
    axis = call.axis(call.attribute("axis", 1), call.rank(0))
    tensors = [call.tensor(i) for i in range(len(call.values)) if 0 not in call.shape(i)]
    return call.function(F.concat, tensors, axis=axis) if len(tensors) > 1 else tensors[0]


def _split(call: Call) -> Any:
    axis = call.axis(call.attribute("axis", 0), call.rank(0))
    total, count = call.shape(0)[axis], len(call.node.outputs)
    parts = call.ints(1, None) if call.version >= 13 else call.ints("split", None)
    declared = call.attribute("num_outputs", None)
    if parts is None:
        size = -(-total // (declared or count))
        parts = [min(size, total - size * i) for i in range(count)]
    if sum(parts) != total or len(parts) != count or min(parts) < 1:
        call.refuse(f"splits an axis of size {total} into {parts}")
    if len({shape[axis] for shape in call.shapes(0)}) > 1:
        call.refuse("splits the batch: fix the batch")
    if count == 1:
        return call.tensor(0)
    ends = [sum(parts[: i + 1]) for i in range(count - 1)]
    return call.builder.call_function(F.split, call.tensor(0), ends, axis=axis, name=list(call.node.outputs))


def _slice(call: Call) -> Any:
    rank = call.rank(0)
    if call.version >= 10:
        starts, ends = call.sizes(1), call.sizes(2)
        axes = call.ints(3, list(range(len(starts))))
        steps = call.ints(4, [1] * len(starts))
    else:
        starts, ends = call.ints("starts"), call.ints("ends")
        axes = call.ints("axes", list(range(len(starts))))
        steps = [1] * len(starts)
    index: list[Any] = [slice(None)] * rank
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        position = call.axis(axis, rank)
        index[position] = _range(call, start, end, step, [shape[position] for shape in call.shapes(0)])
    if all(part == slice(None) for part in index):
        return call.tensor(0)
    return call.method("__getitem__", call.tensor(0), tuple(index))


def _range(call: Call, start: Any, end: Any, step: int, sizes: list[int]) -> slice:
    """Returns the part of an axis as a Python slice that holds for every batch."""
    if step == 0:
        call.refuse("has the step 0")
    if not isinstance(start, int) or not isinstance(end, int):
        size = sizes[0]
        first = 0 if isinstance(start, int) and start == 0 else None
        last = getattr(end, "recorded", end)
        if step == 1 and first == 0 and last >= size and getattr(end, "factor", 1) >= 1:
            return slice(None)
        call.refuse("slices at places that depend on the batch: fix the batch")
    if len(set(sizes)) > 1:
        whole = step == 1 and start == 0 and end >= 2**31 - 1
        if whole:
            return slice(None)
        bounds = [slice(start, end, step).indices(size) for size in sizes]
        if start < 0 or len(set(bounds)) > 1:
            return slice(start, end if abs(end) < 2**31 - 1 else None, step)
        return slice(*bounds[0])
    first, last, step = slice(start, end, step).indices(sizes[0])
    if (first, last, step) == (0, sizes[0], 1):
        return slice(None)
    if len(range(first, last, step)) == 0:
        call.refuse("gives an empty tensor, which MegEngine cannot compute with")
    return slice(first, None if last < 0 else last, step)


def _pad(call: Call) -> Any:
    rank, mode = call.rank(0), call.attribute("mode", "constant")
    if call.version >= 11:
        pads, value = call.ints(1), call.scalar(2, 0)
        axes = [call.axis(a, rank) for a in call.ints(3, list(range(rank)))]
    else:
        pads, value, axes = call.ints("pads"), call.attribute("value", 0.0), list(range(rank))
    widths = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        widths[axis] = (pads[i], pads[i + len(axes)])
    x = call.tensor(0)
    if any(n < 0 for pair in widths for n in pair):
        cut = [
            slice(max(-b, 0), size - max(-a, 0)) for (b, a), size in zip(widths, call.shape(0), strict=True)
        ]
        if mode != "constant" or len(set(call.shapes(0))) > 1:
            call.refuse("has negative pads with this mode or a free batch")
        x = call.method("__getitem__", x, tuple(cut))
        widths = [(max(b, 0), max(a, 0)) for b, a in widths]
    if not any(n for pair in widths for n in pair):
        return x
    if mode not in ("constant", "reflect", "edge"):
        call.refuse(f"pads in the mode {mode!r}, which MegEngine has not")
    if mode == "reflect" and any(max(pair) >= n for pair, n in zip(widths, call.shape(0), strict=True)):
        call.refuse("reflects more than the tensor holds")
    if call.dtype(0).kind != "f":
        call.refuse(f"pads {call.dtype(0).name}; MegEngine pads float32")
    names = {"constant": "constant", "reflect": "reflect", "edge": "replicate"}
    return call.function(F.nn.pad, x, tuple(widths), names[mode], float(value))


def _triangle(call: Call) -> Any:
    """Keeps the upper or lower triangle of the last two axes, and sets the rest to 0."""
    upper, offset = bool(call.attribute("upper", 1)), int(call.scalar(1, 0))
    rows, columns = call.shape(0)[-2:]
    if len({shape[-2:] for shape in call.shapes(0)}) > 1:
        call.refuse("takes a triangle of the batch: fix the batch")
    ones = np.ones((rows, columns), bool)
    triangle = np.triu(ones, offset) if upper else np.tril(ones, offset)
    mask = call.layers.tensor(
        Stored(triangle.reshape((1,) * (call.rank(0) - 2) + triangle.shape), f"{call.name}_mask")
    )
    x = call.tensor(0)
    if call.dtype(0) == np.bool_:
        return call.function(F.logical_and, x, mask)
    zeros = call.function(F.zeros_like, x)
    return call.function(F.where, call.expanded(mask, call.shapes(0)), x, zeros)


def _depth_to_space(call: Call) -> Any:
    block, mode = call.attribute("blocksize"), call.attribute("mode", "DCR")
    _, channels, height, width = call.shape(0)
    rest = channels // block**2
    if mode == "CRD":
        return call.function(F.nn.pixel_shuffle, call.tensor(0), block)
    parts = call.function(F.reshape, call.tensor(0), (-1, block, block, rest, height, width))
    moved = call.function(F.transpose, parts, (0, 3, 4, 1, 5, 2))
    return call.function(F.reshape, moved, (-1, rest, height * block, width * block))


def _space_to_depth(call: Call) -> Any:
    block = call.attribute("blocksize")
    _, channels, height, width = call.shape(0)
    rows, columns = height // block, width // block
    parts = call.function(F.reshape, call.tensor(0), (-1, channels, rows, block, columns, block))
    moved = call.function(F.transpose, parts, (0, 3, 5, 1, 2, 4))
    return call.function(F.reshape, moved, (-1, channels * block**2, rows, columns))


LOWERINGS: dict[str, Lowering] = {
    "Transpose": _transpose,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "DepthToSpace": _depth_to_space,
    "Trilu": _triangle,
    "SpaceToDepth": _space_to_depth,
}
