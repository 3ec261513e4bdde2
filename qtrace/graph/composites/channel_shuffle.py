"""Channel shuffle: the channels of several groups, interleaved.

Source: Zhang et al. 2018, "ShuffleNet". Every exporter writes Reshape to (N, groups, C / groups, ...),
Transpose of the axes 1 and 2, and Reshape. ``prepare`` keeps the pieces, which move integers in every
runtime.
"""

from __future__ import annotations

import math

from qtrace.graph import functions
from qtrace.graph.algebra import AnyTensor, Operation
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.operations import read_operation
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import shape_of

__all__ = ["RULES", "ChannelShuffle", "permutation"]


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
    """``reshape(transpose(reshape(x, (N, groups, C / groups, ...)), (0, 2, 1, ...)), shape of x)``."""

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


RULES = (ChannelShuffle(),)
