"""Scaled dot-product attention: ``softmax(scale * query @ transposed key + bias + mask) @ value``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import megengine.functional as F

from qtrace.graph import functions
from qtrace.graph.algebra import AnyOf, AnyTensor, Operation, Product, Sum
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.edit import GraphEditor
from qtrace.graph.operations import read_operation
from qtrace.graph.pattern import Pattern, PatternMatch
from qtrace.graph.types import Node, TensorNode
from qtrace.graph.walk import shape_of

__all__ = ["RULES", "Attention"]


def _scaled(tensor: Pattern, scale: str) -> Pattern:
    return AnyOf(Product(tensor, scale=scale), tensor)


_KEY = AnyOf(Operation("transpose", AnyTensor("key"), name="turned"), AnyTensor("key"))
_PRODUCT = Operation(
    "matmul", _scaled(AnyTensor("x"), "query_scale"), _scaled(_KEY, "key_scale"), name="product"
)
_SCORES = _scaled(_PRODUCT, "scale")
_BIASED = AnyOf(Sum(_SCORES, AnyTensor("bias"), name="biased"), _SCORES)
_SPLIT = Operation("reshape", _BIASED, name="windows")
_WINDOWS = Operation("reshape", Sum(_SPLIT, AnyTensor("mask"), name="masked"), name="joined")
_MASKED = AnyOf(
    Sum(_SCORES, AnyTensor("mask")), Sum(_SCORES, AnyTensor("bias"), AnyTensor("mask")), _WINDOWS, _SCORES
)
_WEIGHTS = Operation("softmax", _MASKED, name="weights")


class Attention(CompositeRule):
    """Scaled dot-product attention: ``softmax(scale * query @ transposed key + bias + mask) @ value``.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2.1. Exporters write MatMul, Div or
    Mul, Add, Softmax, MatMul with a Transpose of the keys; PyTorch's own function multiplies queries and keys
    by the root of the scale. Swin adds a bias for each relative position, and a mask for each window of an
    image between two reshapes (Liu et al. 2021, "Swin Transformer", section 3.2). The rule takes apart a
    transpose of the keys: one that also moves other axes stays without its swap of the last two. ``prepare``
    keeps the pieces, whose products have integer kernels.
    """

    title = "scaled dot-product attention"
    formula = "matmul(softmax(scale * matmul(query, transposed key) + bias + mask), value)"
    becomes = "functions.scaled_dot_product_attention"
    keeps_shape = False
    in_prepare = False
    pattern = Operation("matmul", _WEIGHTS, AnyTensor("value"))

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses other axes, transposed operands, and a mask that widens the scores."""
        query, key, value, weights = (match[n] for n in ("x", "key", "value", "weights"))
        rank = len(shape_of(query))
        if rank < 2 or {len(shape_of(key)), len(shape_of(value))} != {rank}:
            return "its queries, keys and values have unequal numbers of axes"
        axis = _setting(weights, "axis")
        if axis not in (-1, rank - 1) and axis not in ([-1], [rank - 1]):
            return f"its softmax is over the axis {axis}, that of attention is the last"
        if any(_setting(n, "transpose_a") for n in (match["product"], match.node)):
            return "its queries or weights are transposed in the product"
        if _setting(match.node, "transpose_b"):
            return "its values are transposed in the product"
        if (_swapped(match) is None) != bool(_setting(match["product"], "transpose_b")):
            return "its keys are not transposed, but have the axis of the scores last"
        return _mask_problem(match)

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.scaled_dot_product_attention` on the keys before their transpose."""
        scale = 1.0
        for name in ("query_scale", "key_scale", "scale"):
            scale *= match.get(name, 1.0)
        mask, bias, shapes = match.get("mask"), match.get("bias"), {}
        args: tuple[Any, ...] = (match["x"], match["key"], match["value"], mask, scale)
        if match.get("windows") is not None:
            shapes[3] = _window_shape(match)
        return CompositeCall(
            functions.scaled_dot_product_attention, (*args, bias) if bias is not None else args, shapes
        )

    def rewrite(self, match: PatternMatch, editor: GraphEditor) -> Mapping[Node, Node]:
        """Writes the rest of the keys' transpose, if it moves other axes too, before the call."""
        order = _swapped(match)
        if order is not None and order != tuple(range(len(order))):
            key = match["key"]
            like = match["turned"]
            turned = editor.call_function(F.transpose, key, order, after=like.expr, like=like)
            turned.shape = tuple(shape_of(key)[axis] for axis in order)
            match = PatternMatch(match.node, match.exprs, {**match.bound, "key": turned})
        return super().rewrite(match, editor)


def _mask_problem(match: PatternMatch) -> str | None:
    """Returns why a mask or bias does not fit attention, as a clause, or None."""
    scores, mask = shape_of(match["product"]), match.get("mask")
    if mask is None:
        return None
    wide = f"its mask has the shape {shape_of(mask)}, that of the scores is {scores}"
    windows, biased = match.get("windows"), match.get("biased")
    if shape_of(match["weights"]) != scores or (biased is not None and shape_of(biased) != scores):
        return wide
    if windows is None:
        return None
    split = shape_of(windows)
    if len(split) != len(scores) + 1 or split[2:] != scores[1:]:
        return f"its scores are reshaped to {split}, which does not split {scores} into windows"
    if shape_of(match["masked"]) != split or _window_shape(match)[0] != 1:
        return f"its mask has the shape {shape_of(mask)}, that of the windows is {split}"
    return None


def _window_shape(match: PatternMatch) -> tuple[int, ...]:
    """Returns the shape of the mask of windows with as many axes as the windows."""
    own, rank = shape_of(match["mask"]), len(shape_of(match["windows"]))
    return (1,) * (rank - len(own)) + own


def _setting(node: TensorNode, name: str) -> Any:
    operation = read_operation(node)
    return None if operation is None else operation.settings.get(name)


def _swapped(match: PatternMatch) -> tuple[int, ...] | None:
    """Returns the transpose of the keys with its last two axes exchanged; None without a transpose."""
    turned = match.get("turned")
    order = None if turned is None else _setting(turned, "pattern")
    if order is None or not all(isinstance(axis, int) for axis in order):
        return None
    rank = len(order)
    places = [axis % rank for axis in order] if rank else list(range(len(shape_of(match["key"]))))[::-1]
    return (*places[:-2], places[-1], places[-2])


RULES = (Attention(),)
