"""GELU by tanh: ``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.

Source: Hendrycks and Gimpel 2016, "Gaussian error linear units", section 2. TensorFlow and GPT-2 write the
power, others ``x * (1 + 0.044715 * x * x)`` or ``x * x * x``.
"""

from __future__ import annotations

import math

from qtrace.graph import functions
from qtrace.graph.algebra import AnyOf, AnyTensor, Operation, Power, Product, Sum, close
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.pattern import PatternMatch

__all__ = ["RULES", "GeluTanh"]

_X = AnyTensor("x")
_CUBIC = AnyOf(
    Product(Sum(_X, Product(Power(_X, 3.0), scale="cubic")), scale="inner"),
    Product(_X, Sum(Product(Power(_X, 2.0), scale="cubic"), constant="linear"), scale="inner"),
    Sum(Product(_X, scale="inner"), Product(Power(_X, 3.0), scale="whole")),
)
_TANH = Operation("tanh", _CUBIC)


class GeluTanh(CompositeRule):
    """``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``."""

    title = "GELU (tanh)"
    formula = "0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))"
    becomes = "functions.gelu_tanh"
    pattern = AnyOf(
        Product(_X, Sum(_TANH, constant="one"), scale="half"),
        Product(_X, Sum(Product(_TANH, scale="factor"), constant="one")),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses numbers that differ from the formula."""
        half, inner, linear = match.get("half", 1.0), match["inner"], match.get("linear", 1.0)
        whole = match.get("whole", inner * match.get("cubic", 0.0))
        root = math.sqrt(2.0 / math.pi)
        values = {
            "factor of tanh": (half * match.get("factor", 1.0), 0.5),
            "constant term": (half * match["one"], 0.5),
            "linear factor in tanh": (inner * linear, root),
            "cubic factor in tanh": (whole, 0.044715 * root),
        }
        for name, (value, expected) in values.items():
            if not close(value, expected):
                return f"its {name} is {value:.6g}, that of GELU {expected:.6g}"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.gelu_tanh`."""
        return CompositeCall(functions.gelu_tanh, (match["x"],))


RULES = (GeluTanh(),)
