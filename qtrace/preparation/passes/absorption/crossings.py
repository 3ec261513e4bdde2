"""Ops through which a map ``x * gain + shift`` passes, towards the inputs or towards the outputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall
from qtrace.preparation.passes.absorption.maps import LinearMap, identity_map
from qtrace.preparation.passes.absorption.moves import MOVES, element_places, pull_back, push_forward

__all__ = ["BlockedError", "pass_backward", "pass_forward"]

_HOMOGENEOUS = ("relu", "leaky_relu", "prelu")
_MAX_POOLS = ("max_pool2d", "adaptive_max_pool2d")
_MEAN_POOLS = ("avg_pool2d", "adaptive_avg_pool2d", "interpolate")
_REDUCTIONS = ("mean", "sum", "max", "min")

Passed = list[tuple[TensorNode, LinearMap]]


class BlockedError(Exception):
    """A map cannot pass; the message gives the reason as a clause.

    Args:
        reason: the reason.
        always: whether no map passes here, whichever its numbers are.
    """

    def __init__(self, reason: str, always: bool = False) -> None:
        super().__init__(reason)
        self.always = always


def pass_backward(call: OpCall, out: TensorNode, map: LinearMap) -> Passed:
    """Returns the maps of the inputs of ``call`` for which it gives ``map`` at its output ``out``.

    Raises:
        BlockedError: when there are no such maps.
    """
    _check(call, map)
    if call.kind == "concat":
        return _split_map(call, map)
    (x,) = call.inputs
    shape = _shape(x)
    if call.kind in _REDUCTIONS:
        return [(x, _expanded(call, map, len(shape)))]
    if call.kind == "pad":
        inside = tuple(slice(before, before + n) for (before, _), n in zip(_widths(call), shape, strict=True))
        whole = map.full(_shape(out))
        return [(x, LinearMap(whole.gain[inside], whole.shift[inside]).compressed())]
    if call.kind not in MOVES:
        return [(x, map)]
    partial = call.kind in ("getitem", "split")
    if map.is_uniform and not partial:
        return [(x, map.with_rank(len(shape)))]
    places = element_places(call, out)
    if places is None and map.is_uniform and len(call.expr.outputs) == 1:
        return [(x, map.with_rank(len(shape)))]
    pulled = None if places is None else pull_back(map, places, shape)
    if pulled is None:
        raise BlockedError(f"{call.out.name} ({call.kind}) mixes elements with different numbers")
    return [(x, pulled)]


def pass_forward(call: OpCall, x: TensorNode, map: LinearMap) -> Passed:
    """Returns the maps of the outputs of ``call`` if its input ``x`` has ``map``.

    Raises:
        BlockedError: when the outputs lack such maps.
    """
    if call.kind != "concat" and call.inputs != (x,):
        raise BlockedError(f"{call.out.name} ({call.kind}) reads it with other values", always=True)
    _check(call, map)
    if call.kind == "concat":
        return [(call.out, _joined_map(call, x, map))]
    if call.kind in _REDUCTIONS:
        return [(call.out, _reduced(call, map, len(_shape(x))))]
    if call.kind == "pad":
        whole, widths = map.full(_shape(x)), _widths(call)
        gain, shift = (
            np.pad(a, widths, constant_values=n) for a, n in ((whole.gain, np.nan), (whole.shift, 0))
        )
        return [(call.out, LinearMap(gain, shift).compressed())]
    if call.kind not in MOVES:
        return [(call.out, map)]
    passed = []
    for out in call.outputs:
        if map.is_uniform:
            passed.append((out, map.with_rank(len(_shape(out)))))
            continue
        places = element_places(call, out)
        if places is None:
            raise BlockedError(f"the indices of {out.name} ({call.kind}) are computed in the graph", True)
        passed.append((out, push_forward(map, places, _shape(x))))
    return passed


def _check(call: OpCall, map: LinearMap) -> None:
    """Raises the reason why ``map`` does not pass an op of the kind of ``call``."""
    name = f"{call.out.name} ({call.kind})"
    kind = call.kind
    known = (*_HOMOGENEOUS, *_MAX_POOLS, *_MEAN_POOLS, *_REDUCTIONS, *MOVES, "concat", "pad")
    nodes = (*call.inputs, *call.outputs)
    if kind not in known or not call.inputs or any(n.shape is None for n in nodes):
        raise BlockedError(f"{name} does not pass a factor on", always=True)
    if kind == "concat" and len(call.attrs["parts"]) != len(call.inputs):
        raise BlockedError(f"{name} joins constants, too", always=True)
    no_shift = kind in (*_HOMOGENEOUS, "sum", "dropout", "pad") or _counts_padding(call)
    if no_shift and map.shifts:
        raise BlockedError(f"{name} passes no sum on")
    if kind in (*_HOMOGENEOUS, *_MAX_POOLS, "max", "min") and not map.is_positive:
        raise BlockedError(f"{name} passes no factor on that is negative or 0")
    if kind in (*_MAX_POOLS, *_MEAN_POOLS):
        along = tuple(range(2, len(_shape(call.out))))
    else:
        along = _padded_axes(call) if kind == "pad" else ()
    if not map.is_constant_along(along):
        raise BlockedError(f"{name} mixes elements with different numbers")


def _counts_padding(call: OpCall) -> bool:
    return call.kind == "avg_pool2d" and bool(call.attrs["count_include_pad"]) and any(call.attrs["padding"])


def _padded_axes(call: OpCall) -> tuple[int, ...]:
    """Returns the axes along which the values of a padding are copies of others."""
    if call.attrs["mode"] != "constant":
        return tuple(i for i, pair in enumerate(_widths(call)) if any(pair))
    if call.attrs["value"] != 0.0:
        raise BlockedError(f"{call.out.name} pads with {call.attrs['value']:g}", always=True)
    return ()


def _widths(call: OpCall) -> list[tuple[int, int]]:
    """Returns the padding before and after each axis of the input."""
    widths = [(int(a), int(b)) for a, b in call.attrs["width"]]
    return widths + [(0, 0)] * (len(_shape(call.inputs[0])) - len(widths))


def _split_map(call: OpCall, map: LinearMap) -> Passed:
    axis, passed, start = _axis(call), [], 0
    for node in call.inputs:
        size = _shape(node)[axis]
        passed.append((node, _part(map, axis, start, size)))
        start += size
    return passed


def _part(map: LinearMap, axis: int, start: int, size: int) -> LinearMap:
    arrays: list[Any] = [map.gain, map.shift]
    for index, array in enumerate(arrays):
        if array.shape[axis] > 1:
            arrays[index] = np.take(array, range(start, start + size), axis=axis)
    return LinearMap(*arrays).compressed()


def _joined_map(call: OpCall, x: TensorNode, map: LinearMap) -> LinearMap:
    """Returns the map of a concat of which only the parts that are ``x`` have a map."""
    axis, none = _axis(call), identity_map(len(_shape(x)))
    maps = [(map if node is x else none, _shape(node)[axis]) for node in call.inputs]
    arrays = []
    for field in ("gain", "shift"):
        parts = [getattr(part, field) for part, _ in maps]
        form = [max(array.shape[i] for array in parts) for i in range(none.gain.ndim)]
        sizes = [[*form[:axis], size, *form[axis + 1 :]] for _, size in maps]
        whole = [np.broadcast_to(array, size) for array, size in zip(parts, sizes, strict=True)]
        arrays.append(np.concatenate(whole, axis=axis))
    return LinearMap(*arrays).compressed()


def _axis(call: OpCall) -> int:
    return int(call.attrs["axis"]) % len(_shape(call.out))


def _reduced_axes(call: OpCall, rank: int) -> tuple[int, ...]:
    axes = call.attrs["axis"]
    return tuple(range(rank)) if axes is None else tuple(axis % rank for axis in axes)


def _expanded(call: OpCall, map: LinearMap, rank: int) -> LinearMap:
    """Returns the map of the input of a reduction."""
    if map.is_uniform:
        return map.with_rank(rank)
    if call.attrs["keepdims"]:
        return map
    axes = _reduced_axes(call, rank)
    return LinearMap(*(np.expand_dims(a, axes) for a in (map.gain, map.shift)))


def _reduced(call: OpCall, map: LinearMap, rank: int) -> LinearMap:
    """Returns the map of the result of a reduction."""
    axes = _reduced_axes(call, rank)
    if not map.is_constant_along(axes):
        raise BlockedError(f"{call.out.name} ({call.kind}) mixes elements with different numbers")
    if map.is_uniform:
        return map.with_rank(len(_shape(call.out)))
    if call.attrs["keepdims"]:
        return map
    return LinearMap(*(np.squeeze(a, axes) for a in (map.gain, map.shift)))


def _shape(node: TensorNode) -> tuple[int, ...]:
    return tuple(int(n) for n in node.shape)
