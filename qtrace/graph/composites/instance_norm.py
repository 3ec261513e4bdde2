"""Instance norm: ``(x - mean) / sqrt(variance + eps) * weight + bias`` over the places of each channel.

Source: Ulyanov et al. 2016, "Instance normalization". TensorFlow and models by hand write the means.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import megengine.functional as F

from qtrace.graph.algebra import AnyOf, AnyTensor, Product
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.composites.standardized import affine, axes_problem, reduced_axes, standardized
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.walk import shape_of

__all__ = ["RULES", "InstanceNorm", "channels_problem"]

_FACTORS, _DISTRIBUTED, _DISTRIBUTED_AFFINE = standardized(AnyTensor("x"))
_NORM = Product(*_FACTORS)


def channels_problem(match: PatternMatch, ranks: Container[int] = (4,)) -> str | None:
    """Returns why weight and bias are not one number per channel, as a clause, or None.

    Args:
        match: the norm.
        ranks: the numbers of axes that the norm can have.
    """
    shape = shape_of(match["x"])
    rank = len(shape)
    if rank not in ranks:
        return f"its input has {rank} axes, MegEngine's norm takes images with 4"
    for name in ("weight", "bias"):
        node = match.get(name)
        if node is None:
            continue
        own = (1,) * (rank - len(shape_of(node))) + shape_of(node)
        if own != (1, shape[1], *[1] * (rank - 2)):
            return f"its {name} has the shape {shape_of(node)}, not one number per channel"
    return None


class InstanceNorm(CompositeRule):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the places of an image."""

    title = "instance norm"
    formula = "(x - mean(x)) / sqrt(mean((x - mean(x))**2) + eps) * weight + bias, over height and width"
    becomes = "F.nn.instance_norm"
    pattern = AnyOf(affine(_NORM), _DISTRIBUTED_AFFINE, _NORM, _DISTRIBUTED)

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses other axes than height and width, and weights that are not per channel."""
        problem = axes_problem(match, match["x"])
        if problem is not None:
            return problem
        axes = reduced_axes(match["variance"], match["x"])
        if axes != (2, 3):
            return f"its means are over the axes {axes}, those of an instance norm are (2, 3)"
        return channels_problem(match)

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.nn.instance_norm`."""
        weight, flat = match.get("weight"), (shape_of(match["x"])[1],)
        args: tuple[Any, ...] = (match["x"], weight is not None, weight, match.get("bias"), match["eps"])
        return CompositeCall(F.nn.instance_norm, args, {2: flat, 3: flat})


RULES = (InstanceNorm(),)
