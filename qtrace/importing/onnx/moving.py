"""Which folded nodes only move the numbers of a learned tensor, and how."""

from __future__ import annotations

from collections.abc import Sequence

from qtrace.graph.moves import Move, part_of, reshaped_to, transposed_by
from qtrace.importing.onnx.model import OnnxNode
from qtrace.importing.onnx.values import Stored, Value

__all__ = ["PARTS", "moves_of"]

PARTS = {"Split"}
"""Ops whose results are parts of the tensor."""

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
