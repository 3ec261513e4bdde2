"""Assigns the ops of a graph to parts by a function of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr, Input
from megengine.traced_module.node import Node

from qtrace.errors import GraphError
from qtrace.graph.parts.build import copyable_exprs
from qtrace.graph.walk import exprs

__all__ = ["assign_labels"]


def assign_labels(flat: TracedModule, by: Callable[[Node], Hashable]) -> dict[Expr, int]:
    """Returns the index of the part of each op, for all exprs but those of `copyable_exprs`.

    Args:
        flat: a flat float graph.
        by: takes the first output of an op, returns the label of its part.

    Raises:
        GraphError: when a label cannot be a key, or when two labels depend on each other.
    """
    copyable = copyable_exprs(flat)
    labels = {expr: _label(by, expr) for expr in exprs(flat) if expr not in copyable and expr.outputs}
    if not labels:
        raise GraphError("split: the graph has no op that depends on the values of its inputs.")
    before: dict[Any, dict[Any, Node]] = {label: {} for label in labels.values()}  # label -> what it reads
    sources: dict[Node, dict[Any, Node]] = {}  # a copied result -> the parts whose sizes it reads
    for expr in exprs(flat):
        read: dict[Any, Node] = {}
        for node in expr.inputs:
            if isinstance(node.expr, Input):
                continue
            read |= {labels[node.expr]: node} if node.expr in labels else sources.get(node, {})
        if expr in labels:
            own = labels[expr]
            before[own].update((label, node) for label, node in read.items() if label != own)
        else:
            sources.update((node, read) for node in expr.outputs)
    order = _in_order(before)
    index = {label: i for i, label in enumerate(order)}
    return {expr: index[label] for expr, label in labels.items()}


def _label(by: Callable[[Node], Hashable], expr: Expr) -> Hashable:
    node = expr.outputs[0]
    label = by(node)
    try:
        hash(label)
    except TypeError:
        raise GraphError(
            f"split: the function says {label!r} of node {node._name!r}, which cannot be a key."
        ) from None
    return label


def _in_order(before: dict[Any, dict[Any, Node]]) -> list[Any]:
    """The labels, each behind those that it reads, and else as they first occur."""
    order: dict[Any, None] = {}
    waiting = list(before)
    while waiting:
        ready = next((label for label in waiting if before[label].keys() <= order.keys()), None)
        if ready is None:
            raise GraphError(f"split: {_circle(before, order.keys(), waiting[0])}.")
        waiting.remove(ready)
        order[ready] = None
    return list(order)


def _circle(before: dict[Any, dict[Any, Node]], done: Collection[Any], label: Any) -> str:
    """Says how parts depend on each other, from one that waits for itself through others."""
    path: list[tuple[Any, Node]] = []
    while label not in [each for each, _ in path]:
        other, node = next((o, n) for o, n in before[label].items() if o not in done)
        path.append((label, node))
        label = other
    circle = path[[each for each, _ in path].index(label) :]
    others = [*(each for each, _ in circle[1:]), label]
    reads = [
        f"{own!r} reads {node._name} of {other!r}" for (own, node), other in zip(circle, others, strict=True)
    ]
    return f"no part can run first: {', '.join(reads)}"
