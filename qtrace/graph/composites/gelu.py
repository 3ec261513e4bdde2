"""GELU by the error function: ``0.5 * x * (1 + erf(x / sqrt(2)))``.

Source: Hendrycks and Gimpel 2016, "Gaussian error linear units". PyTorch before opset 20 and Paddle write
Div, Erf, Add, Mul, Mul; tf2onnx and models by hand put the factor 0.5 elsewhere, or write
``x * (0.5 + 0.5 * erf)``.
"""

from __future__ import annotations

import math

import megengine.functional as F

from qtrace.graph.algebra import AnyOf, AnyTensor, Operation, Product, Sum, close
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.pattern import PatternMatch

__all__ = ["RULES", "Gelu"]

_X = AnyTensor("x")
_ERF = Operation("erf", Product(_X, scale="inner"))


class Gelu(CompositeRule):
    """``0.5 * x * (1 + erf(x / sqrt(2)))``."""

    title = "GELU"
    formula = "0.5 * x * (1 + erf(x / sqrt(2)))"
    becomes = "F.gelu"
    pattern = AnyOf(
        Product(_X, Sum(_ERF, constant="one"), scale="half"),
        Product(_X, Sum(Product(_ERF, scale="factor"), constant="one")),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses other numbers than 0.5, 1 and 1 / sqrt(2)."""
        half = match.get("half", 1.0)
        values = {
            "factor of the error function": (half * match.get("factor", 1.0), 0.5),
            "constant term": (half * match["one"], 0.5),
            "factor in the error function": (match["inner"], 1.0 / math.sqrt(2.0)),
        }
        for name, (value, expected) in values.items():
            if not close(value, expected):
                return f"its {name} is {value:.6g}, that of GELU {expected:.6g}"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.gelu`."""
        return CompositeCall(F.gelu, (match["x"],))


RULES = (Gelu(),)
