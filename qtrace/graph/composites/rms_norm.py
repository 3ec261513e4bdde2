"""RMS norm: ``x / sqrt(mean(x * x) + eps) * weight``.

Source: Zhang and Sennrich 2019, "Root mean square layer normalization". PyTorch's Llama writes Pow,
ReduceMean, Add, Sqrt, Reciprocal or Div, Mul, Mul; T5 the same with a division.
"""

from __future__ import annotations

from qtrace.graph import functions
from qtrace.graph.algebra import AnyOf, AnyTensor, Operation, Power, Product, StoredOperand, Sum
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.composites.standardized import reduced_axes
from qtrace.graph.operations import read_operation
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.types import TensorNode

__all__ = ["RULES", "RmsNorm"]

_X = AnyTensor("x")
_SQUARES = Operation("mean", Product(Power(_X, 2.0)), name="squares")
_ROOT = Power(AnyOf(Sum(_SQUARES, constant="eps"), _SQUARES), -0.5)


def _is_centered(x: TensorNode) -> bool:
    """Returns whether ``x`` is a difference from a mean."""
    operation = read_operation(x)
    if operation is None or operation.kind != "sub":
        return False
    subtracted = read_operation(operation.operands[1])
    return subtracted is not None and subtracted.kind == "mean"


class RmsNorm(CompositeRule):
    """``x / sqrt(mean(x * x) + eps) * weight``."""

    title = "RMS norm"
    formula = "x / sqrt(mean(x * x) + eps) * weight, over one axis"
    becomes = "functions.rms_norm"
    pattern = AnyOf(Product(_X, _ROOT, StoredOperand("weight")), Product(_X, _ROOT))

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses a mean over several axes, and one without a small number."""
        axes = reduced_axes(match["squares"], match["x"])
        if axes is None or len(axes) != 1:
            return f"its mean is over the axes {axes}, not over one that is kept as 1"
        if _is_centered(match["x"]):
            return "its input is centered around its mean: it is the second half of another norm"
        eps = match.get("eps")
        if eps is None or not 0.0 < eps < 1.0:
            return "nothing small is added to the mean, as a norm does against a division by 0"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.rms_norm`."""
        axes = reduced_axes(match["squares"], match["x"])
        assert axes is not None
        return CompositeCall(functions.rms_norm, (match["x"], match.get("weight"), axes[0], match["eps"]))


RULES = (RmsNorm(),)
