"""Ops that pick numbers by index, and searches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.values import Stored

__all__ = ["LOWERINGS"]


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
        call.refuse("picks samples of the batch from its end: fix the batch")
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
    if len(set(call.shapes(0))) > 1 or len(set(call.shapes(1))) > 1:
        call.refuse("picks by place from a tensor with a free batch: fix the batch")
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


def _arg(function: Callable[..., Any]) -> Lowering:
    def lower(call: Call) -> Any:
        rank = call.rank(0)
        axis = call.axis(call.attribute("axis", 0), rank)
        keep = bool(call.attribute("keepdims", 1))
        if call.attribute("select_last_index", 0):
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
    if call.dtype(0).name not in ("float32", "float16", "int32", "int64"):
        call.refuse(f"sums {call.dtype(0).name}")
    back = (*[slice(None)] * axis, slice(None, None, -1))
    x = call.method("__getitem__", call.tensor(0), back) if turned else call.tensor(0)
    total = call.function(F.cumsum, x, axis)
    if exclusive:
        total = call.function(F.sub, total, x)
    return call.method("__getitem__", total, back) if turned else total


def _top_k(call: Call) -> Any:
    axis = call.axis(call.attribute("axis", -1), call.rank(0))
    largest, ordered = call.attribute("largest", 1), call.attribute("sorted", 1)
    if not ordered or axis != call.rank(0) - 1 or call.rank(0) != 2 or call.dtype(0).kind != "f":
        call.refuse("finds the largest along another axis than the last of a matrix, or unordered")
    count = int(call.scalar(1)) if call.version >= 10 else call.attribute("k")
    names = list(call.node.outputs)
    return call.builder.call_function(F.topk, call.tensor(0), count, descending=bool(largest), name=names)


LOWERINGS: dict[str, Lowering] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "ArgMax": _arg(F.argmax),
    "ArgMin": _arg(F.argmin),
    "CumSum": _cum_sum,
    "TopK": _top_k,
}
