"""The nodes of a float graph at which noise is measured."""

from __future__ import annotations

from qtrace.graph.dataflow import needed_nodes, static_nodes
from qtrace.graph.opaque import opaque_calls
from qtrace.graph.types import Input, Node, TensorNode, TracedModule
from qtrace.graph.walk import is_float_tensor, owner, reads_shape, tensor_inputs
from qtrace.outputs.selections import SORTS, find_selecting, read_places
from qtrace.preparation.placement._slopes import has_slopes

__all__ = ["find_ends", "find_scores", "find_unseen"]


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
