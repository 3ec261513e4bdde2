"""Scale and shift by stored tensors, as one call."""

from __future__ import annotations

from qtrace.graph import functions
from qtrace.graph.algebra import AnyTensor, Product, StoredOperand, Sum
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.operations import is_stored
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import is_float_tensor, shape_of

__all__ = ["RULES", "ScaleAndShift"]


def _long_axes(node: TensorNode, rank: int) -> tuple[int, ...]:
    """Returns the axes of a tensor with ``rank`` axes along which a stored tensor has several numbers."""
    shape = shape_of(node)
    return tuple(rank - len(shape) + i for i, n in enumerate(shape) if n > 1)


class ScaleAndShift(CompositeRule):
    """Scale and shift: ``x * scale + shift`` with stored tensors of one number, or one per index.

    Source: PP-OCRv4's LearnableAffineBlock (PPLCNetV3), FrozenBatchNorm, ResMLP's Affine; ActNorm of Kingma
    and Dhariwal 2018, "Glow". Products and sums with Python numbers are no parameters and stay as they are.
    """

    title = "scale and shift"
    formula = "x * scale + shift, with stored scale and shift"
    becomes = "functions.scale_and_shift"
    kind = "scale_and_shift"
    pattern = Sum(Product(AnyTensor("x"), StoredOperand("scale")), StoredOperand("shift"))

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses tensors with numbers along several axes, such as an embedding of positions."""
        x, rank = match["x"], len(shape_of(match["x"]))
        if is_stored(x) or not all(is_float_tensor(n) for n in (x, match["scale"], match["shift"])):
            return "it multiplies and adds stored tensors, or integers"
        axes = {n: _long_axes(match[n], rank) for n in ("scale", "shift")}
        for name, long in axes.items():
            if len(long) > 1:
                return f"its {name} has the shape {shape_of(match[name])}: numbers along {len(long)} axes"
        if len({long for long in axes.values() if long}) > 1:
            return "its scale and its shift are along unequal axes"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.scale_and_shift`."""
        return CompositeCall(functions.scale_and_shift, (match["x"], match["scale"], match["shift"]))


RULES = (ScaleAndShift(),)
