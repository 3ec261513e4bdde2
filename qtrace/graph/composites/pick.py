"""Pick: one place of an axis, ``x[:, 1]``, written as a slice of length 1 and a squeeze.

Source: formats without an index along one axis, such as the ONNX files of qtrace itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import megengine.functional as F

from qtrace.graph.algebra import AnyTensor, Operation
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.composites.slices import read_slices
from qtrace.graph.edit import GraphEditor
from qtrace.graph.operations import read_operation
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.types import Node
from qtrace.graph.walk import shape_of

__all__ = ["RULES", "Pick"]


class Pick(CompositeRule):
    """A slice of length 1 without its axis."""

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


RULES = (Pick(),)
