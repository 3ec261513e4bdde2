"""The values and weights whose rounding is measured, and the nodes at which its noise is measured."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import numpy as np
from megengine import Tensor

from qtrace.graph.dataflow import evaluate_fixed, fixed_nodes, needed_nodes, static_nodes
from qtrace.graph.opaque import opaque_calls
from qtrace.graph.tensors import count_bytes, read_array, stored_tensor
from qtrace.graph.types import Expr, Input, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, owner, reads_shape, tensor_inputs
from qtrace.numerics import choose, fake_quantize
from qtrace.ops import OpCall
from qtrace.outputs.selections import SORTS, find_selecting, read_places
from qtrace.preparation.placement._slopes import has_slopes
from qtrace.process.memory import LargeFrees
from qtrace.scheme import QScheme

__all__ = ["PlannedSchemes", "Sites", "find_ends", "find_scores", "find_sites", "find_unseen"]


@dataclass(frozen=True)
class PlannedSchemes:
    """The scheme of each value and each weight that may be rounded.

    Attributes:
        activation: the scheme of values without one of their own, read as one per tensor.
        weight: the scheme of weights without one of their own, per channel or per tensor.
        values: node -> the scheme of its value.
        weights: expr of a layer -> the scheme of its weight.
    """

    activation: QScheme
    weight: QScheme
    values: Mapping[Node, QScheme] = field(default_factory=dict)
    weights: Mapping[Expr, QScheme] = field(default_factory=dict)

    def of_value(self, node: Node) -> QScheme:
        """Returns the scheme of the value of a node."""
        return self.values.get(node, self.activation)

    def of_weight(self, expr: Expr) -> QScheme:
        """Returns the scheme of the weight of a layer."""
        return self.weights.get(expr, self.weight)


@dataclass(frozen=True)
class Sites:
    """What is measured.

    Attributes:
        values: the nodes whose values are rounded.
        weights: expr of a layer -> the node of its weight and the rounded weight.
        ends: the nodes at which noise is measured.
    """

    values: frozenset[Node]
    weights: Mapping[Expr, tuple[Node, Tensor]]
    ends: tuple[Node, ...]


def find_sites(
    model: TracedModule,
    calls: Mapping[Expr, OpCall],
    schemes: PlannedSchemes,
    names: Container[str] | None = None,
) -> Sites:
    """Finds what can be measured.

    Args:
        model: a flat, expanded float graph.
        calls: expr -> the `OpCall` that it is read as.
        schemes: the schemes of the weights.
        names: the names of the nodes whose values, and of the layers' results whose weights are rounded;
            None for all.
    """
    fixed = fixed_nodes(model)
    layers = {e: c.weight for e, c in calls.items() if c.weight is not None and c.weight in fixed}
    exact = evaluate_fixed(model, layers.values())
    weights, frees = {}, LargeFrees()
    frees.note(sum(map(count_bytes, layers.values())))  # of the rounded weights of an earlier call
    for expr, node in layers.items():
        if names is not None and expr.outputs[0].name not in names:
            continue
        rounded = _round_weight(read_array(exact[node]), calls[expr].channel_axes, schemes.of_weight(expr))
        if rounded is not None and is_float_tensor(expr.outputs[0]):
            weights[expr] = (node, stored_tensor(rounded, trainable=False))
            frees.note(4 * rounded.nbytes)  # of the steps of rounding
    operands = {node for call in calls.values() for node in call.inputs}
    nodes = [*model.graph.inputs, *(node for expr in exprs(model) for node in expr.outputs)]
    values = {n for n in nodes if is_float_tensor(n) and (n not in fixed or n in operands)}
    if names is not None:
        values = {node for node in values if node.name in names}
    ends = dict.fromkeys((*find_ends(model), *find_scores(model), *find_unseen(model)))
    return Sites(frozenset(values), weights, tuple(ends))


def find_ends(model: TracedModule) -> tuple[Node, ...]:
    """Returns the float outputs, and for outputs of integers the float values that they are computed from."""
    static = static_nodes(model)
    ends: dict[Node, None] = {}
    visited: set[Node] = set()
    waiting = list(model.graph.outputs)
    while waiting:
        node = waiting.pop(0)
        if node in visited or node in static or not isinstance(node, TensorNode):
            continue
        visited.add(node)
        if is_float_tensor(node):
            ends[node] = None
        elif not isinstance(node.expr, Input) and not reads_shape(node.expr):
            waiting += tensor_inputs(node.expr)
    return tuple(ends)


def find_scores(model: TracedModule) -> tuple[Node, ...]:
    """Returns the scores by which the graph sorts rows that leave it: their noise exchanges rows."""
    static, needed = static_nodes(model), needed_nodes(model)
    rankings = [(e, call) for e in find_selecting(model) if (call := read_places(e)) is not None]
    read = [e for e, call in rankings if call.kind in SORTS and not needed.isdisjoint(e.outputs)]
    scores = (n for e in read for n in tensor_inputs(e) if is_float_tensor(n) and n not in static)
    return tuple(dict.fromkeys(scores))


def find_unseen(model: TracedModule) -> tuple[Node, ...]:
    """Returns the values that nodes without a gradient read: no probe at the outputs sees their noise."""
    static, needed = static_nodes(model), needed_nodes(model)
    read = [
        expr
        for expr in opaque_calls(model)
        if not has_slopes(owner(expr)) and any(n in needed and is_float_tensor(n) for n in expr.outputs)
    ]
    values = (n for e in read for n in tensor_inputs(e) if is_float_tensor(n) and n not in static)
    return tuple(dict.fromkeys(values))


def _round_weight(weight: np.ndarray, axes: tuple[int, ...], scheme: QScheme) -> np.ndarray | None:
    """Rounds a weight; returns None for one that has no values or is not finite.

    Args:
        weight: the weight.
        axes: the axes that count its channels; none if they are unknown.
        scheme: the scheme; per channel if it has an axis.
    """
    if not weight.size or not np.isfinite(weight).all():
        return None
    if scheme.axis is None or not axes:
        flat, scheme = weight.reshape(1, -1), scheme.replace(axis=None)
        qparams = choose(flat.min(), flat.max(), scheme)
        return fake_quantize(weight, qparams)
    moved = np.moveaxis(weight, axes, range(len(axes)))
    flat = moved.reshape(math.prod(moved.shape[: len(axes)]), -1)
    qparams = choose(flat.min(axis=1), flat.max(axis=1), scheme.replace(axis=0))
    rounded = fake_quantize(flat, qparams).reshape(moved.shape)
    return np.ascontiguousarray(np.moveaxis(rounded, range(len(axes)), axes))
