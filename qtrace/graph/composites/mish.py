"""Mish: ``x * tanh(softplus(x))`` with ``softplus(x) = log(1 + exp(x))``.

Source: Misra 2019, "Mish: a self regularized non-monotonic activation function". PyTorch before opset 18 and
Paddle write Softplus, Tanh and Mul; TensorFlow and models by hand write the logarithm.
"""

from __future__ import annotations

from qtrace.graph import functions
from qtrace.graph.algebra import AnyOf, AnyTensor, Operation, Product, Sum, close
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.pattern import PatternMatch

__all__ = ["RULES", "Mish"]

_X = AnyTensor("x")
_EXP = Operation("exp", _X)
_SOFTPLUS = AnyOf(
    Operation("softplus", _X),
    Operation("log1p", _EXP),
    Operation("log", Sum(_EXP, constant="one")),
)


class Mish(CompositeRule):
    """``x * tanh(log(1 + exp(x)))``."""

    title = "Mish"
    formula = "x * tanh(softplus(x))"
    becomes = "functions.mish"
    pattern = Product(_X, Operation("tanh", _SOFTPLUS))

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses another number than 1 in the logarithm."""
        summand = match.get("one", 1.0)
        return (
            None
            if close(summand, 1.0)
            else f"its logarithm reads {summand:g} + exp(x), that of softplus 1 + exp(x)"
        )

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.mish`."""
        return CompositeCall(functions.mish, (match["x"],))


RULES = (Mish(),)
