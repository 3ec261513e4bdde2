"""Which folded nodes only move the numbers of a learned tensor, and how."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qtrace.graph.moves import Move, part_of, reshaped_to, transposed_by
from qtrace.importing.onnx.model import OnnxNode
from qtrace.importing.onnx.naming import is_anonymous
from qtrace.importing.onnx.values import Stored, Value

__all__ = ["PARTS", "moves_of", "unchanged"]

PARTS = {"Split"}
"""Ops whose results are parts of the tensor."""

# Op -> the number beside which a tensor stays as it is. torch's exporter writes the `value` of addcmul so.
_NEUTRAL = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}
_RESHAPES = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}


def moves_of(node: OnnxNode, source: Stored, results: Sequence[Value]) -> list[tuple[Move, ...] | None]:
    """Returns the moves that made each result of ``source``; None for a result that was computed.

    Args:
        node: a node of ONNX's own that was folded.
        source: its first input.
        results: its results.
    """
    shapes = [result.array.shape if isinstance(result, Stored) else None for result in results]
    rank = source.array.ndim
    if node.op in _RESHAPES:
        return [None if shape is None else (reshaped_to(shape),) for shape in shapes]
    if node.op == "Transpose":
        return [(transposed_by(node.attributes.get("perm", range(rank - 1, -1, -1))),)]
    if node.op in PARTS and rank and all(shape is not None for shape in shapes):
        axis = int(node.attributes.get("axis", 0)) % rank
        moves: list[tuple[Move, ...] | None] = []
        first = 0
        for shape in shapes:
            end = first + (shape[axis] if shape is not None else 0)
            moves.append((part_of(axis, first, end),))
            first = end
        return moves
    return [None] * len(results)


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
