"""Layer norm: ``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last axes.

Source: Ba et al. 2016, "Layer normalization". PyTorch before opset 17 and Paddle write ReduceMean, Sub, Pow,
ReduceMean, Add, Sqrt, Div, Mul, Add; Keras the distributed form (``standardized.py``). A weight without a
bias stays a multiplication after the norm.
"""

from __future__ import annotations

import math
from typing import Any

import megengine.functional as F

from qtrace.graph.algebra import AnyOf, AnyTensor, Product
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.composites.standardized import affine, axes_problem, reduced_axes, standardized
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.walk import shape_of

__all__ = ["NORM_PATTERN", "RULES", "LayerNorm", "call_layer_norm"]

_FACTORS, _DISTRIBUTED, _DISTRIBUTED_AFFINE = standardized(AnyTensor("x"))
_NORM = Product(*_FACTORS)
# A standardization of any axes, with weight and bias or without.
NORM_PATTERN = AnyOf(affine(_NORM), _DISTRIBUTED_AFFINE, _NORM, _DISTRIBUTED)


def call_layer_norm(match: PatternMatch, inner: tuple[int, ...]) -> CompositeCall:
    """Returns the call of `F.nn.layer_norm` over last axes of the sizes ``inner`` for `NORM_PATTERN`."""
    weight = match.get("weight")
    args: tuple[Any, ...] = (match["x"], inner, weight is not None, weight, match.get("bias"), match["eps"])
    return CompositeCall(F.nn.layer_norm, args, {3: inner, 4: inner})


class LayerNorm(CompositeRule):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last axes."""

    title = "layer norm"
    formula = "(x - mean(x)) / sqrt(mean((x - mean(x))**2) + eps) * weight + bias, over the last axes"
    becomes = "F.nn.layer_norm"
    pattern = NORM_PATTERN

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses means over other axes than the last, and weights of another shape."""
        x = match["x"]
        problem = axes_problem(match, x)
        if problem is not None:
            return problem
        axes, rank = self._axes(match), len(shape_of(x))
        if axes != tuple(range(rank - len(axes), rank)):
            return f"its means are over the axes {axes}, those of a layer norm are the last of {rank}"
        if rank == 4 and axes == (2, 3) and match.get("weight") is None:
            return "it is an instance norm"
        inner = shape_of(x)[-len(axes) :]
        for name in ("weight", "bias"):
            node = match.get(name)
            if node is None:
                continue
            shape = shape_of(node)
            if shape[len(shape) - len(axes) :] != inner or math.prod(shape) != math.prod(inner):
                return f"its {name} has the shape {shape}, that of a layer norm {inner}"
        return None

    @staticmethod
    def _axes(match: PatternMatch) -> tuple[int, ...]:
        axes = reduced_axes(match["variance"], match["x"])
        assert axes is not None
        return axes

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.nn.layer_norm` with the shape of the last axes."""
        return call_layer_norm(match, shape_of(match["x"])[-len(self._axes(match)) :])


RULES = (LayerNorm(),)
