"""L2 normalization: ``x / max(norm(x), eps)`` with ``norm(x) = sqrt(sum(x * x))``.

PyTorch's ``F.normalize`` is written as ReduceL2, Clip, Expand, Div; Paddle writes the sum of squares with a
root, TensorFlow's ``l2_normalize`` ``x * rsqrt(max(sum(x * x), eps))``. An eps that is added makes another
function, which stays in pieces.
"""

from __future__ import annotations

import math

import megengine.functional as F

from qtrace.graph.algebra import AnyOf, AnyTensor, Number, Operation, Power, Product, Sum
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.composites.standardized import reduced_axes
from qtrace.graph.operations import read_operation
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.walk import shape_of

__all__ = ["RULES", "Normalize"]

_X = AnyTensor("x")
_SQUARES = Operation("sum", Product(Power(_X, 2.0)), name="reduced")
_LENGTH = AnyOf(Product(Power(_SQUARES, 0.5)), Operation("norm", _X, name="reduced"))
_BOUNDED = Operation("maximum", _LENGTH, Number("eps"))
_WIDENED = Operation("broadcast_to", AnyOf(_BOUNDED, _LENGTH), name="wide")


class Normalize(CompositeRule):
    """``x / max(sqrt(sum(x * x)), eps)``."""

    title = "L2 normalization"
    formula = "x / max(sqrt(sum(x * x)), eps), over one axis"
    becomes = "F.normalize"
    pattern = AnyOf(
        Product(_X, Power(AnyOf(_BOUNDED, _WIDENED), -1.0)),
        Product(_X, Power(Operation("maximum", _SQUARES, Number("squared_eps")), -0.5)),
        Product(_X, Power(Sum(_SQUARES, constant="added"), -0.5)),
        Product(_X, Power(Sum(_LENGTH, constant="added"), -1.0)),
        Product(_X, Power(_SQUARES, -0.5)),
        Product(_X, Power(Operation("norm", _X, name="reduced"), -1.0)),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses a number that is added, several axes, and another norm."""
        if match.get("added") is not None:
            return f"{match['added']:g} is added where F.normalize has a lower bound"
        axes = reduced_axes(match["reduced"], match["x"])
        if axes is None or len(axes) != 1:
            return f"its length is over the axes {axes}, not over one that is kept as 1"
        operation = read_operation(match["reduced"])
        if operation is not None and operation.kind == "norm" and operation.settings["ord"] not in (None, 2):
            return f"its norm has the order {operation.settings['ord']:g}, not 2"
        if match.get("wide") is not None and shape_of(match["wide"]) != shape_of(match["x"]):
            return "its length is broadcast to another shape"
        if match.get("squared_eps", 0.0) < 0.0:
            return "its lower bound is negative"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.normalize`."""
        axes = reduced_axes(match["reduced"], match["x"])
        assert axes is not None
        eps = match.get("eps", math.sqrt(match.get("squared_eps", 0.0)))
        return CompositeCall(F.normalize, (match["x"], 2.0, axes[0], eps))


RULES = (Normalize(),)
