"""Moves of values that exporters write in pieces; the docstring of a rule has its formula and its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import megengine.functional as F

from qtrace.graph import functions
from qtrace.graph.algebra import AnyOf, AnyTensor, Operation
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.edit import GraphEditor
from qtrace.graph.operations import read_operation
from qtrace.graph.pattern import Pattern, PatternMatch
from qtrace.graph.types import Node, TensorNode
from qtrace.graph.walk import shape_of

__all__ = ["RULES", "ChannelShuffle", "Focus", "Pick", "Roll", "SpaceToDepth", "permutation", "read_slices"]


def read_slices(node: TensorNode, x: TensorNode) -> dict[int, range] | None:
    """Returns axis -> the places that an index of ``x`` by slices takes, of axes that are not taken whole.

    Args:
        node: the result of the index.
        x: what is indexed.

    Returns:
        None for an index by numbers, tensors, or slices whose bounds are computed.
    """
    operation = read_operation(node)
    if operation is None or operation.kind != "getitem":
        return None
    (index,) = operation.settings.values()
    shape = shape_of(x)
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        place = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    ranges: dict[int, range] = {}
    for axis, part in enumerate(parts):
        if not isinstance(part, slice) or axis >= len(shape):
            return None
        if not all(b is None or isinstance(b, int) for b in (part.start, part.stop, part.step)):
            return None
        places = range(shape[axis])[part]
        if places != range(shape[axis]):
            ranges[axis] = places
    return ranges


def permutation(node: TensorNode) -> tuple[int, ...] | None:
    """Returns the order of axes of the transpose that gives ``node``; None if it is computed or adds axes."""
    operation = read_operation(node)
    order = None if operation is None else operation.settings.get("pattern")
    rank = len(shape_of(node))
    if not isinstance(order, (tuple, list)) or not all(isinstance(axis, int) for axis in order):
        return None
    places = tuple(axis % rank for axis in order) or tuple(range(rank))[::-1]
    return places if sorted(places) == list(range(rank)) else None


class ChannelShuffle(CompositeRule):
    """Channel shuffle: the channels of several groups, interleaved.

    Source: Zhang et al. 2018, "ShuffleNet". Every exporter writes Reshape to (N, groups, C / groups, ...),
    Transpose of the axes 1 and 2, and Reshape. ``prepare`` keeps the pieces, which move integers in every
    runtime.
    """

    title = "channel shuffle"
    formula = "reshape(transpose(reshape(x, (N, groups, C / groups, ...)), (0, 2, 1, ...)), shape of x)"
    becomes = "functions.channel_shuffle"
    keeps_shape = False
    in_prepare = False
    pattern = Operation(
        "reshape",
        Operation("transpose", Operation("reshape", AnyTensor("x"), name="split"), name="moved"),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses another order of axes, and other shapes."""
        shape, parts = shape_of(match["x"]), shape_of(match["split"])
        if shape_of(match.node) != shape:
            return f"its result has the shape {shape_of(match.node)}, that of the input is {shape}"
        order = permutation(match["moved"])
        if order is None or order != (0, 2, 1, *range(3, len(parts))):
            return f"it transposes by {order}, a shuffle exchanges the axes 1 and 2"
        rest = math.prod(shape[2:])
        if parts[0] != shape[0] or math.prod(parts[3:]) != rest or parts[1] * parts[2] != shape[1]:
            return f"its first reshape, to {parts}, does not split the {shape[1]} channels"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.channel_shuffle`."""
        return CompositeCall(functions.channel_shuffle, (match["x"], shape_of(match["split"])[1]))


_ORDER = {3: 0, 5: 1, 1: 2}  # axis of the reshaped image -> row in the block, column in the block, channel


class SpaceToDepth(CompositeRule):
    """Space to depth: each block of places of an image in the channels.

    Source: Shi et al. 2016, "Real-time single image and video super-resolution", whose pixel shuffle it
    inverts. Exporters write Reshape to (N, C, H / b, b, W / b, b), Transpose and Reshape; YOLOX's Focus
    concatenates four slices with step 2. ``prepare`` keeps the pieces, which move integers in every runtime.
    """

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
    """Four slices with step 2, concatenated, as YOLOv5 and YOLOX write their Focus layer."""

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
        source = x if operation is None else operation.operands[0]
        ranges = read_slices(node, source)
        if ranges is None or not begins.keys().isdisjoint(ranges):
            return None
        for axis, places in ranges.items():
            if places not in (range(begin, shape_of(source)[axis], 2) for begin in (0, 1)):
                return None
            begins[axis] = places.start
        node = source
    return (begins[2], begins[3]) if sorted(begins) == [2, 3] else None


class Roll(CompositeRule):
    """Roll: the two parts of a tensor, exchanged along one axis.

    Source: `torch.roll`, which exporters write as two slices and a concatenation, along one axis after the
    other; Swin's shifted windows (Liu et al. 2021, "Swin Transformer", section 3.2).
    """

    title = "roll"
    formula = "concat([x[:, n:], x[:, :n]], axis=1), along any axis"
    becomes = "F.roll"
    pattern = Operation(
        "concat",
        Operation("getitem", AnyTensor("x"), name="end"),
        Operation("getitem", AnyTensor("x"), name="begin"),
        name="joined",
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses slices that are not the two parts of the tensor."""
        if _cut(match) is None:
            return (
                f"{match['end'].name} and {match['begin'].name} are not the end and the beginning of one axis"
            )
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.roll`."""
        cut = _cut(match)
        assert cut is not None
        axis, number = cut
        return CompositeCall(F.roll, (match["x"], -number, axis))


def _cut(match: PatternMatch) -> tuple[int, int] | None:
    """Returns the axis and the length of the part that comes to the end; None for other slices."""
    x, operation = match["x"], read_operation(match["joined"])
    rank, axis = len(shape_of(x)), None if operation is None else operation.settings.get("axis")
    if not isinstance(axis, int) or not -rank <= axis < rank:
        return None
    axis %= rank
    size = shape_of(x)[axis]
    end, begin = (read_slices(match[name], x) for name in ("end", "begin"))
    if end is None or begin is None or set(end) != {axis} or set(begin) != {axis}:
        return None
    cut = begin[axis].stop
    return (axis, cut) if begin[axis] == range(cut) and end[axis] == range(cut, size) else None


class Pick(CompositeRule):
    """Pick: one place of an axis, ``x[:, 1]``, written as a slice of length 1 and a squeeze.

    Source: formats without an index along one axis, such as the ONNX files of qtrace itself.
    """

    title = "pick"
    formula = "squeeze(x[:, n : n + 1], axis=1), along any axis"
    becomes = "x[:, n]"
    keeps_shape = False
    in_prepare = False
    pattern = Operation("squeeze", Operation("getitem", AnyTensor("x"), name="part"), name="squeezed")

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses slices of several places or axes, and a squeeze of another axis."""
        if self._index(match) is None:
            return f"{match['part'].name} is no slice of length 1 along the axis that is squeezed"
        return None

    @staticmethod
    def _index(match: PatternMatch) -> tuple[Any, ...] | None:
        part, rank = match["part"], len(shape_of(match["x"]))
        operation = read_operation(match["squeezed"])
        axis = None if operation is None else operation.settings.get("axis")
        axes = list(axis) if isinstance(axis, (tuple, list)) else [axis]
        slices = read_slices(part, match["x"])
        if slices is None or len(axes) != 1 or not isinstance(axes[0], int):
            return None
        place = axes[0] % rank
        if set(slices) - {place} or place not in slices or len(slices[place]) != 1:
            return None
        return (*[slice(None)] * place, slices[place][0])

    def call(self, match: PatternMatch) -> CompositeCall:
        """Returns the function of the last piece, which `rewrite` does not call."""
        return CompositeCall(F.squeeze, (match["x"], self._index(match)))

    def rewrite(self, match: PatternMatch, editor: GraphEditor) -> Mapping[Node, Node]:
        """Indexes the tensor by the place."""
        x, index = self.call(match).args
        new = editor.call_method("__getitem__", x, index, after=match.exprs[0], like=match.node)
        editor.put_in_place(new, match.node)
        return {}


RULES = (ChannelShuffle(), SpaceToDepth(), Focus(), Roll(), Pick())
