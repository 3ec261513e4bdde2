"""Space to depth: each block of places of an image in the channels.

Source: Shi et al. 2016, "Real-time single image and video super-resolution", whose pixel shuffle it inverts.
Exporters write Reshape to (N, C, H / b, b, W / b, b), Transpose and Reshape; YOLOX's Focus concatenates four
slices with step 2. ``prepare`` keeps the pieces, which move integers in every runtime.
"""

from __future__ import annotations

from typing import Any

from qtrace.graph import functions
from qtrace.graph.algebra import AnyOf, AnyTensor, Operation
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.composites.channel_shuffle import permutation
from qtrace.graph.operations import read_operation
from qtrace.graph.pattern import Pattern, PatternMatch
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import shape_of

__all__ = ["RULES", "Focus", "SpaceToDepth"]

_ORDER = {3: 0, 5: 1, 1: 2}  # axis of the reshaped image -> row in the block, column in the block, channel


class SpaceToDepth(CompositeRule):
    """Reshape, transpose, reshape."""

    title = "space to depth"
    formula = (
        "reshape(transpose(reshape(x, (N, C, H / b, b, W / b, b)), (0, ..., 2, 4)), (N, C * b * b, ...))"
    )
    becomes = "functions.space_to_depth"
    keeps_shape = False
    in_prepare = False
    pattern = Operation(
        "reshape",
        Operation("transpose", Operation("reshape", AnyTensor("x"), name="split"), name="moved"),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses blocks that are no squares, and another order of axes."""
        shape, parts, order = shape_of(match["x"]), shape_of(match["split"]), permutation(match["moved"])
        if len(shape) != 4 or len(parts) != 6:
            return f"its first reshape is from {len(shape)} to {len(parts)} axes, not from 4 to 6"
        block = parts[3]
        if parts != (*shape[:2], shape[2] // block, block, shape[3] // block, block):
            return f"its first reshape, to {parts}, does not split height and width into square blocks"
        if order is None or order[0] != 0 or order[4:] != (2, 4):
            return f"it transposes by {order}, which does not move the blocks to the channels"
        expected = (shape[0], shape[1] * block * block, shape[2] // block, shape[3] // block)
        if shape_of(match.node) != expected:
            return f"its result has the shape {shape_of(match.node)}, not {expected}"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.space_to_depth`."""
        order = permutation(match["moved"])
        assert order is not None
        block = shape_of(match["split"])[3]
        return CompositeCall(
            functions.space_to_depth, (match["x"], block, tuple(_ORDER[a] for a in order[1:4]))
        )


def _slice(number: int) -> Pattern:
    x, name = AnyTensor("x"), f"slice{number}"
    return AnyOf(Operation("getitem", Operation("getitem", x)), Operation("getitem", x), name=name)


class Focus(CompositeRule):
    """Four slices with step 2, concatenated."""

    title = "space to depth (Focus)"
    formula = "concat([x[:, :, r::2, c::2] for each row r and column c of the block], axis=1)"
    becomes = "functions.space_to_depth"
    keeps_shape = False
    in_prepare = False
    pattern = Operation("concat", _slice(0), _slice(1), _slice(2), _slice(3), name="joined")

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses other slices, and another order of them than by rows or by columns."""
        shape, operation = shape_of(match["x"]), read_operation(match["joined"])
        axis = None if operation is None else operation.settings.get("axis")
        if len(shape) != 4 or axis not in (1, -3):
            return f"it joins {len(shape)} axes along the axis {axis}, not images along the channels"
        if shape[2] % 2 or shape[3] % 2:
            return f"its height or width is odd: {shape[2:]}"
        places = [_place(match[f"slice{i}"], match["x"]) for i in range(4)]
        if None in places:
            return f"{match[f'slice{places.index(None)}'].name} is no slice of every second row and column"
        if tuple(places) not in _PLACES:
            return f"it takes the places of a block in the order {places}, not by rows or by columns"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.space_to_depth`."""
        places = tuple(_place(match[f"slice{i}"], match["x"]) for i in range(4))
        return CompositeCall(functions.space_to_depth, (match["x"], 2, _PLACES[places]))


# Rows and columns of four slices -> the order of `functions.space_to_depth`.
_PLACES: dict[Any, tuple[int, int, int]] = {
    ((0, 0), (0, 1), (1, 0), (1, 1)): (0, 1, 2),
    ((0, 0), (1, 0), (0, 1), (1, 1)): (1, 0, 2),
}


def _place(node: TensorNode, x: TensorNode) -> tuple[int, int] | None:
    """Returns row and column at which slices with step 2 begin; None for other slices."""
    begins: dict[int, int] = {}
    while node is not x:
        operation = read_operation(node)
        if operation is None or operation.kind != "getitem":
            return None
        (index,) = operation.settings.values()
        if not _read_slices(index, shape_of(operation.operands[0]), begins):
            return None
        node = operation.operands[0]
    return (begins[2], begins[3]) if sorted(begins) == [2, 3] else None


def _read_slices(index: Any, shape: tuple[int, ...], begins: dict[int, int]) -> bool:
    """Adds the begin of each slice with step 2; returns whether the others are whole axes."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        place = parts.index(Ellipsis)
        parts[place : place + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    if len(parts) > len(shape) or not all(isinstance(part, slice) for part in parts):
        return False
    for axis, part in enumerate(parts):
        bounds = (part.start, part.stop, part.step)
        if not all(b is None or isinstance(b, int) for b in bounds):
            return False
        start, stop, step = part.indices(shape[axis])
        if (start, stop, step) == (0, shape[axis], 1):
            continue
        if step != 2 or start not in (0, 1) or stop != shape[axis] or axis in begins:
            return False
        begins[axis] = start
    return True


RULES = (SpaceToDepth(), Focus())
