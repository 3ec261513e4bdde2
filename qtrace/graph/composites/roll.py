"""Roll: the two parts of a tensor, exchanged along one axis.

Source: `torch.roll`, which exporters write as two slices and a concatenation, along one axis after the other;
Swin's shifted windows (Liu et al. 2021, "Swin Transformer", section 3.2).
"""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.algebra import AnyTensor, Operation
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.composites.slices import read_slices
from qtrace.graph.operations import read_operation
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.walk import shape_of

__all__ = ["RULES", "Roll"]

_X = AnyTensor("x")


class Roll(CompositeRule):
    """The end of a tensor before its beginning."""

    title = "roll"
    formula = "concat([x[:, n:], x[:, :n]], axis=1), along any axis"
    becomes = "F.roll"
    pattern = Operation(
        "concat", Operation("getitem", _X, name="end"), Operation("getitem", _X, name="begin"), name="joined"
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


RULES = (Roll(),)
