"""Softmax: ``exp(x - max(x)) / sum(exp(x - max(x)))`` over one axis.

Source: Bridle 1990, "Probabilistic interpretation of feedforward classification network outputs".
TensorFlow's Keras for other axes than the last, and models by hand, write Max, Sub, Exp, Sum, Div; some leave
out the maximum, which changes nothing but the range of x.
"""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.algebra import AnyOf, AnyTensor, Minus, Operation, Power, Product, Sum
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.composites.standardized import reduced_axes
from qtrace.graph.pattern import Pattern, PatternMatch

__all__ = ["RULES", "Softmax"]

_X = AnyTensor("x")


def _quotient(powers: Pattern) -> Pattern:
    return Product(powers, Power(Operation("sum", powers, name="total"), -1.0))


class Softmax(CompositeRule):
    """``exp(x - max(x)) / sum(exp(x - max(x)))``."""

    title = "softmax"
    formula = "exp(x - max(x)) / sum(exp(x - max(x))), over one axis"
    becomes = "F.softmax"
    pattern = AnyOf(
        _quotient(Operation("exp", Sum(_X, Minus(Operation("max", _X, name="top"))), name="powers")),
        _quotient(Operation("exp", _X, name="powers")),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses several axes, and unequal axes of maximum and sum."""
        x, top = match["x"], match.get("top")
        axes = reduced_axes(match["total"], x)
        if axes is None or len(axes) != 1:
            return f"its sum is over the axes {axes}, not over one that is kept as 1"
        if top is not None and reduced_axes(top, x) != axes:
            return f"its maximum is over the axes {reduced_axes(top, x)}, its sum over {axes}"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.softmax` with a list of one axis: the form that subtracts the largest value."""
        axes = reduced_axes(match["total"], match["x"])
        assert axes is not None
        return CompositeCall(F.softmax, (match["x"], list(axes)))


RULES = (Softmax(),)
