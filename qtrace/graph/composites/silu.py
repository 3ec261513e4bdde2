"""Sigmoid and SiLU: ``1 / (1 + exp(-x))`` and ``x`` times it.

Source: Elfwing et al. 2018, "Sigmoid-weighted linear units"; Ramachandran et al. 2017, "Searching for
activation functions" (swish). PyTorch, Paddle and YOLO's exporters write Mul and Sigmoid; models by hand
``x / (1 + exp(-x))``. A swish with another slope, such as ``x * sigmoid(1.702 * x)``, is no SiLU.
"""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.algebra import AnyOf, AnyTensor, Operation, Power, Product, Sum, close
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.pattern import Pattern, PatternMatch

__all__ = ["RULES", "Sigmoid", "Silu"]

_X = AnyTensor("x")


def _powers(x: Pattern) -> Pattern:
    """Builds the pattern of ``c + exp(-x)``."""
    return Sum(Operation("exp", Product(x, scale="minus")), constant="one")


class Sigmoid(CompositeRule):
    """``1 / (1 + exp(-x))``."""

    title = "sigmoid"
    formula = "1 / (1 + exp(-x))"
    becomes = "F.sigmoid"
    pattern: Pattern = Product(Power(_powers(_X), -1.0), scale="s")

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses other numbers than 1 and -1."""
        for name, expected in (("minus", -1.0), ("one", 1.0), ("s", 1.0)):
            if not close(match.get(name, expected), expected):
                return f"it has the number {match[name]:g} where a sigmoid has {expected:g}"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.sigmoid`."""
        return CompositeCall(F.sigmoid, (match["x"],))


class Silu(Sigmoid):
    """``x * sigmoid(x)``."""

    title = "SiLU (swish)"
    formula = "x * sigmoid(x); x / (1 + exp(-x))"
    becomes = "F.silu"
    pattern = AnyOf(
        Product(_X, Operation("sigmoid", _X)),
        Product(_X, Operation("sigmoid", Product(_X, scale="slope"))),
        Product(_X, Power(_powers(_X), -1.0)),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses a sigmoid of a multiple of x."""
        slope = match.get("slope", 1.0)
        if not close(slope, 1.0):
            return f"its sigmoid reads {slope:g} * x, that of SiLU x"
        return super().obstacle(match)

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.silu`."""
        return CompositeCall(F.silu, (match["x"],))


RULES = (Silu(), Sigmoid())
