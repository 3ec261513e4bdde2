"""Turns activation functions and norms that are written in pieces into one op, before anything is decided.

``qtrace.graph.compose`` does the work. Composites whose pieces have integer kernels, such as the two products
of attention, are written as these pieces instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from typing import Any

import megengine.functional as F

from qtrace.config import QConfig, backends
from qtrace.graph import functions
from qtrace.graph.composites import CompositeRule, compose, composite_rules
from qtrace.graph.composites.base import CompositeCall
from qtrace.graph.edit import GraphEditor
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.types import CallFunction, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, shape_of
from qtrace.ops.arguments import arguments
from qtrace.preparation.passes._pieces import PiecesWriter
from qtrace.preparation.passes.base import Left, PassResult

__all__ = ["compose_pieces", "write_pieces"]


def compose_pieces(traced: TracedModule, config: QConfig, rounded: Collection[str] = ()) -> PassResult:
    """Replaces the pieces of composites by one op, and ops that only their pieces quantize by the pieces.

    Args:
        traced: a flat traced module; it is edited in place.
        config: its backend says which ops run on integers.
        rounded: names of nodes that the model was trained to round: none of them vanishes in a composite.
    """
    known = {"", *backends.get(config.backend).ops}
    rules = [r for r in composite_rules() if r.in_prepare and r.kind in known]
    results = compose(traced, [_Guarded(rule, rounded) for rule in rules] if rounded else rules)
    changed = [f"{r.where}: {r.rule} in one op" for r in results if r.applied]
    left = [Left(r.where, f"no {r.rule}: {r.reason}") for r in results if not r.applied]
    return PassResult((*changed, *write_pieces(traced, known)), tuple(left))


class _Guarded(CompositeRule):
    """A rule that leaves composites with a trained rounding inside as they are."""

    def __init__(self, rule: CompositeRule, rounded: Collection[str]) -> None:
        self.rule, self.rounded = rule, rounded
        self.pattern, self.from_outputs = rule.pattern, rule.from_outputs

    @property
    def name(self) -> str:
        """Name of the rule in reports."""
        return self.rule.name

    def check(self, match: PatternMatch) -> str | None:
        """Returns why ``match`` stays as it is; None if it is replaced."""
        names = (node.name for expr in match.exprs for node in expr.outputs if node is not match.node)
        inside = next((name for name in names if name in self.rounded), None)
        if inside is not None:
            return f"the model's own quantization rounds {inside} inside of it"
        return self.rule.check(match)

    def call(self, match: PatternMatch) -> CompositeCall:
        """Returns the call that replaces ``match``."""
        return self.rule.call(match)

    def rewrite(self, match: PatternMatch, editor: GraphEditor) -> Mapping[Node, Node]:
        """Replaces ``match``."""
        return self.rule.rewrite(match, editor)


def write_pieces(traced: TracedModule, known: Container[str] = ()) -> tuple[str, ...]:
    """Writes composites whose pieces more runtimes have as these pieces.

    Args:
        traced: a flat traced module; it is edited in place.
        known: the ops that stay.

    Returns:
        A line for each composite.
    """
    changed: list[str] = []
    with GraphEditor(traced) as editor:
        for expr in exprs(traced):
            write = _WRITERS.get(expr.func) if isinstance(expr, CallFunction) else None
            if write is not None and expr.func.__name__ not in known:
                changed.append(f"{expr.outputs[0].name}: {expr.func.__name__} in pieces")
                editor.replace_expr(expr, write(PiecesWriter(editor, expr), **arguments(expr)))
    return tuple(changed)


def _attention(
    pieces: PiecesWriter,
    query: TensorNode,
    key: TensorNode,
    value: TensorNode,
    mask: Any,
    scale: float,
    bias: Any,
) -> TensorNode:
    shape = (*shape_of(pieces.like)[:-1], shape_of(key)[-2])
    scores = pieces.call(F.matmul, query, key, False, True, shape=shape)
    if scale != 1.0:
        scores = pieces.call(F.mul, scores, scale, shape=shape)
    if bias is not None:
        scores = pieces.call(F.add, scores, bias, shape=shape)
    if mask is not None and len(shape_of(mask)) > len(shape):
        windows = shape_of(mask)[1]
        split = (shape[0] // windows, windows, *shape[1:])
        scores = pieces.call(F.reshape, scores, (-1, *split[1:]), shape=split)
        scores = pieces.call(F.add, scores, mask, shape=split)
        scores = pieces.call(F.reshape, scores, (-1, *shape[1:]), shape=shape)
    elif mask is not None:
        scores = pieces.call(F.add, scores, mask, shape=shape)
    return pieces.call(F.matmul, pieces.call(F.softmax, scores, [-1], shape=shape), value)


def _channel_shuffle(pieces: PiecesWriter, x: TensorNode, groups: int) -> TensorNode:
    batch, channels, *space = shape_of(x)
    split = (groups, channels // groups, *space)
    y = pieces.call(F.reshape, x, (-1, *split), shape=(batch, *split))
    turned = (channels // groups, groups, *space)
    order = (0, 2, 1, *range(3, 3 + len(space)))
    y = pieces.call(F.transpose, y, order, shape=(batch, *turned))
    return pieces.call(F.reshape, y, (-1, channels, *space))


def _space_to_depth(pieces: PiecesWriter, x: TensorNode, block: int, order: tuple[int, ...]) -> TensorNode:
    batch, channels, height, width = shape_of(x)
    if order[2] == 2:  # one slice after the other, as YOLOX writes it
        first, _, _ = order
        places = [(i, j) if first == 0 else (j, i) for i in range(block) for j in range(block)]
        return pieces.call(F.concat, [pieces.every(x, block, *place) for place in places], 1)
    split = (channels, height // block, block, width // block, block)
    y = pieces.call(F.reshape, x, (-1, *split), shape=(batch, *split))
    axes = (0, *((3, 5, 1)[i] for i in order), 2, 4)
    moved = tuple((batch, *split)[axis] for axis in axes)
    y = pieces.call(F.transpose, y, axes, shape=moved)
    return pieces.call(F.reshape, y, (-1, channels * block * block, height // block, width // block))


def _scale_and_shift(pieces: PiecesWriter, x: TensorNode, scale: TensorNode, shift: TensorNode) -> TensorNode:
    return pieces.call(F.add, pieces.call(F.mul, x, scale), shift)


_WRITERS: dict[Callable[..., Any], Callable[..., TensorNode]] = {
    functions.scaled_dot_product_attention: _attention,
    functions.channel_shuffle: _channel_shuffle,
    functions.space_to_depth: _space_to_depth,
    functions.scale_and_shift: _scale_and_shift,
}
