"""How a parameter of a graph was made of a stored tensor of a file: by moves, which computed nothing.

A layer may read a transposed weight, or a third of the one matrix that a file stores for queries, keys and
values. The moves say where each number of the parameter stands in the stored tensor, so that tuned numbers
find their way back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = [
    "Move",
    "joined",
    "moved",
    "parse_moves",
    "part_of",
    "places_of",
    "reshaped_to",
    "taken_at",
    "transposed_by",
    "undone",
]

# The kind, and its numbers: ("transpose", axes), ("reshape", sizes), ("part", (axis, first, end)),
# ("take", (axis, *places)).
Move = tuple[str, tuple[int, ...]]
_KINDS = ("transpose", "reshape", "part", "take")


def transposed_by(axes: Sequence[int]) -> Move:
    """Returns the move that puts the axes into another order, as `numpy.transpose` does."""
    return "transpose", tuple(int(axis) for axis in axes)


def reshaped_to(sizes: Sequence[int]) -> Move:
    """Returns the move that gives the numbers another shape, in the order of C."""
    return "reshape", tuple(int(size) for size in sizes)


def part_of(axis: int, first: int, end: int) -> Move:
    """Returns the move that takes the places from ``first`` up to ``end`` of an axis."""
    return "part", (int(axis), int(first), int(end))


def taken_at(axis: int, places: Iterable[int]) -> Move:
    """Returns the move that takes places of an axis in any order, one of them several times or not at all."""
    return "take", (int(axis), *(int(place) for place in places))


def joined(moves: Sequence[Move], *more: Move) -> tuple[Move, ...]:
    """Returns moves one after the other, of which a transpose and its inverse are none."""
    result = list(moves)
    for kind, numbers in more:
        if kind == "transpose" and result and result[-1][0] == kind:
            before = result.pop()[1]
            numbers = tuple(before[axis] for axis in numbers)
        if kind != "transpose" or numbers != tuple(range(len(numbers))):
            result.append((kind, numbers))
    return tuple(result)


def undone(shape: Sequence[int], moves: Iterable[Move]) -> tuple[Move, ...] | None:
    """Returns the moves that make the stored tensor of a parameter again; None if numbers are missing.

    Args:
        shape: the shape of the stored tensor.
        moves: what made the parameter.
    """
    back, own = list[Move](), tuple(shape)
    for kind, numbers in moves:
        if kind == "transpose":
            back.insert(0, transposed_by(np.argsort(numbers).tolist()))
            own = tuple(own[axis] for axis in numbers)
        elif kind == "reshape":
            back.insert(0, reshaped_to(own))
            own = np.empty(own, np.bool_).reshape(numbers).shape
        else:
            return None
    return tuple(back)


def places_of(shape: Sequence[int], moves: Iterable[Move]) -> np.ndarray:
    """Returns where each number of the result of some moves stands in the flattened stored tensor.

    Args:
        shape: the shape of the stored tensor.
        moves: the moves in their order.

    Returns:
        int64 indices, of the shape of the result.

    Raises:
        ValueError: when the moves do not fit the shape.
    """
    return moved(np.arange(int(np.prod(shape, dtype=np.int64))).reshape(tuple(shape)), moves)


def moved(values: np.ndarray, moves: Iterable[Move]) -> np.ndarray:
    """Returns the result of some moves of an array.

    Raises:
        ValueError: when the moves do not fit its shape.
    """
    for kind, numbers in moves:
        if kind == "transpose":
            values = values.transpose(numbers)
        elif kind == "reshape":
            values = values.reshape(numbers)
        elif kind == "part":
            axis, first, end = numbers
            values = values.take(range(first, end), axis)
        else:
            axis, *taken = numbers
            try:
                values = values.take(np.array(taken, np.int64), axis)
            except IndexError as error:
                raise ValueError(f"no such places on axis {axis} of a stored tensor") from error
    return values


def parse_moves(items: Any = ()) -> tuple[Move, ...]:
    """Parses moves that were stored as lists.

    Raises:
        ValueError: when they are none.
    """
    moves = tuple((str(kind), tuple(int(n) for n in numbers)) for kind, numbers in items)
    if any(kind not in _KINDS for kind, _ in moves):
        raise ValueError("no such move of a stored tensor")
    return moves
