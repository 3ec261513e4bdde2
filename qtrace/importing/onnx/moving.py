"""Which folded nodes only move the numbers of a learned tensor, and how."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qtrace.graph.origin import Move, part_of, reshaped_to, taken_at, transposed_by
from qtrace.importing.onnx.model import OnnxNode
from qtrace.importing.onnx.naming import is_anonymous
from qtrace.importing.onnx.values import Stored, Value

__all__ = ["MAX_TAKEN", "PARTS", "moves_of", "unchanged"]

PARTS = {"Split", "Slice", "Gather", "GatherND", "Expand", "Tile"}
"""Ops whose results are parts of the tensor, or hold some of its numbers several times."""

# Op -> the number with which a tensor stays as it is. torch's exporter writes the `value` of addcmul so.
_NEUTRAL = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}
_RESHAPES = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}
_CASTS = {"Cast", "CastLike"}
# Places that the moves of one op may list: the record of them is kept as text.
MAX_TAKEN = 2**17


def moves_of(
    node: OnnxNode, values: Sequence[Value | None], results: Sequence[Value]
) -> list[tuple[Move, ...] | None]:
    """Returns the moves that made each result of the first input; None for a result that was computed.

    Args:
        node: a node of ONNX's own that was folded.
        values: its inputs, of which the first is stored.
        results: its results.
    """
    source = values[0]
    assert isinstance(source, Stored)
    shapes = [result.array.shape if isinstance(result, Stored) else None for result in results]
    rank = source.array.ndim
    if node.op in _RESHAPES:
        return [None if shape is None else (reshaped_to(shape),) for shape in shapes]
    if node.op in _CASTS:
        same = isinstance(results[0], Stored) and results[0].array.dtype == source.array.dtype
        return [() if same else None]
    if node.op == "Transpose":
        return [(transposed_by(node.attributes.get("perm", range(rank - 1, -1, -1))),)]
    if node.op in _TAKING and source.array.dtype.kind == "f" and shapes[0] is not None:
        others = [value.array if isinstance(value, Stored) else None for value in values[1:]]
        moves_taken = _TAKING[node.op](node, source.array.shape, others, shapes[0])
        count = sum(len(numbers) for kind, numbers in moves_taken or () if kind == "take")
        return [moves_taken if count <= MAX_TAKEN else None]
    if node.op == "Split" and rank and all(shape is not None for shape in shapes):
        axis = int(node.attributes.get("axis", 0)) % rank
        moves: list[tuple[Move, ...] | None] = []
        first = 0
        for shape in shapes:
            end = first + (shape[axis] if shape is not None else 0)
            moves.append((part_of(axis, first, end),))
            first = end
        return moves
    return [None] * len(results)


def _gather(
    node: OnnxNode, _: tuple[int, ...], others: Sequence[np.ndarray | None], result: tuple[int, ...]
) -> tuple[Move, ...] | None:
    if others[0] is None:
        return None
    return taken_at(node.attributes.get("axis", 0), others[0].reshape(-1)), reshaped_to(result)


def _gather_nd(
    node: OnnxNode, shape: tuple[int, ...], others: Sequence[np.ndarray | None], result: tuple[int, ...]
) -> tuple[Move, ...] | None:
    """torch's exporter writes ``table[places]`` so."""
    if others[0] is None or node.attributes.get("batch_dims", 0):
        return None
    count = others[0].shape[-1]
    own = np.moveaxis(others[0].reshape(-1, count) % shape[:count], 1, 0)
    places = np.ravel_multi_index(tuple(own), shape[:count])
    return reshaped_to((-1, *shape[count:])), taken_at(0, places), reshaped_to(result)


def _slice(
    node: OnnxNode, shape: tuple[int, ...], others: Sequence[np.ndarray | None], _: tuple[int, ...]
) -> tuple[Move, ...] | None:
    given = dict(zip(("starts", "ends", "axes", "steps"), others, strict=False)) or node.attributes
    lists = {key: np.reshape(own, -1).tolist() for key, own in given.items() if own is not None}
    if "starts" not in lists or "ends" not in lists:
        return None
    starts = lists["starts"]
    axes, steps = lists.get("axes", range(len(starts))), lists.get("steps", [1] * len(starts))
    moves = []
    for first, end, axis, step in zip(starts, lists["ends"], axes, steps, strict=True):
        places = range(shape[axis])[first:end:step]
        plain = places.step == 1
        moves.append(part_of(axis, places.start, places.stop) if plain else taken_at(axis, places))
    return tuple(moves)


def _repeat(
    _: OnnxNode, shape: tuple[int, ...], __: Sequence[np.ndarray | None], result: tuple[int, ...]
) -> tuple[Move, ...] | None:
    own = (*[1] * (len(result) - len(shape)), *shape)
    axes = [axis for axis, (size, new) in enumerate(zip(own, result, strict=True)) if size != new]
    if sum(result[axis] for axis in axes) > MAX_TAKEN or any(not own[axis] for axis in axes):
        return None
    return reshaped_to(own), *(taken_at(axis, [n % own[axis] for n in range(result[axis])]) for axis in axes)


# Op -> what makes its moves of the node, its tensor's shape, its other inputs and its result's shape.
_TAKING = {"Gather": _gather, "GatherND": _gather_nd, "Slice": _slice, "Expand": _repeat, "Tile": _repeat}


def unchanged(node: OnnxNode, values: Sequence[Value | None], results: Sequence[Value]) -> Stored | None:
    """Returns the learned tensor that a node multiplies by 1, or adds to 0; None for any other node."""
    if node.op not in _NEUTRAL or node.domain or len(values) != 2 or len(results) != 1:
        return None
    orders = (0, 1) if node.op in ("Mul", "Add") else (0,)
    for index in orders:
        tensor, number = values[index], values[1 - index]
        if not isinstance(tensor, Stored) or not isinstance(number, Stored):
            continue
        named = tensor.learned and not is_anonymous(tensor.name)
        fixed = number.array.size == 1 and (not number.learned or is_anonymous(number.name))
        result = results[0]
        if named and fixed and np.all(number.array == _NEUTRAL[node.op]) and isinstance(result, Stored):
            return tensor if np.array_equal(result.array, tensor.array) else None
    return None
