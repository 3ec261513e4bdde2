"""The standardization that norms have in common: ``(x - mean) / sqrt(variance + eps)`` over some axes.

Exporters write the variance as the mean of squares (a product, a power or a square), divide by the root or
multiply by a power of -0.5. TensorFlow's ``batch_normalization`` distributes the product:
``x * inv + (bias - mean * inv)`` with ``inv = weight / sqrt(variance + eps)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qtrace.graph.algebra import AnyOf, Minus, Operation, Power, Product, StoredOperand, Sum
from qtrace.graph.operations import read_operation
from qtrace.graph.pattern import Pattern, PatternMatch
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import shape_of

__all__ = ["affine", "axes_problem", "reduced_axes", "standardized"]


def _spread(x: Pattern) -> Pattern:
    """Builds the pattern of ``variance + eps``; the mean in it may be a call of its own."""
    centered = Sum(x, Minus(Operation("mean", x, name="inner_mean")))
    variance = AnyOf(
        Operation("mean", Product(Power(centered, 2.0)), name="variance"),
        Operation("var", x, name="variance"),
    )
    return AnyOf(Sum(variance, constant="eps", name="spread"), variance)


def standardized(x: Pattern) -> tuple[tuple[Pattern | Power, ...], Sum, Sum]:
    """Builds the patterns of a standardization.

    Returns:
        The factors of the product, and TensorFlow's form of the whole without and with weight and bias.
    """
    spread, mean = Power(_spread(x), -0.5), Operation("mean", x, name="mean")
    weight, bias = StoredOperand("weight"), StoredOperand("bias")
    return (
        (Sum(x, Minus(mean)), spread),
        Sum(Product(x, spread_of := Power(_spread(x), -0.5)), Minus(Product(mean, spread_of))),
        Sum(Product(x, spread_of, weight), bias, Minus(Product(mean, spread_of, weight))),
    )


def affine(value: Pattern) -> Sum:
    """Builds the pattern of ``value * weight + bias`` with stored tensors."""
    return Sum(Product(value, StoredOperand("weight")), StoredOperand("bias"))


def reduced_axes(reduction: TensorNode, x: TensorNode) -> tuple[int, ...] | None:
    """Returns the axes of ``x`` that a reduction removes and keeps as 1, sorted; None for another shape."""
    operation = read_operation(reduction)
    axis = None if operation is None else operation.settings.get("axis")
    rank = len(shape_of(x))
    if axis is None or isinstance(axis, TensorNode):
        return None
    listed: Sequence[Any] = axis if isinstance(axis, (tuple, list)) else (axis,)
    if not all(isinstance(a, int) and -rank <= a < rank for a in listed):
        return None
    axes = tuple(sorted(a % rank for a in listed))
    reduced = tuple(1 if i in axes else n for i, n in enumerate(shape_of(x)))
    return axes if shape_of(reduction) == reduced else None


def axes_problem(match: PatternMatch, x: TensorNode) -> str | None:
    """Returns why the means of a standardization of ``x`` are not of one norm, as a clause, or None."""
    names = [n for n in ("mean", "inner_mean", "variance") if match.get(n) is not None]
    axes = [reduced_axes(match[n], x) for n in names]
    if None in axes:
        return f"the mean {match[names[axes.index(None)]].name} does not keep its axes as 1"
    if len(set(axes)) > 1:
        return f"its means are over unequal axes: {', '.join(str(a) for a in dict.fromkeys(axes))}"
    eps = match.get("eps")
    if eps is None or not 0.0 < eps < 1.0:
        return "nothing small is added to the variance, as a norm does against a division by 0"
    return None
