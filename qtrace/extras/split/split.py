"""Cuts a graph after named nodes, or by a function of the nodes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr, Input
from megengine.traced_module.node import Node, TensorNode

from qtrace.errors import GraphError
from qtrace.extras.split.build import build_parts, copyable_exprs, flat_copy
from qtrace.extras.split.composition import Composition
from qtrace.graph.walk import exprs
from qtrace.plugins.arguments import check_arguments

__all__ = ["split"]


@check_arguments
def split(
    traced: TracedModule,
    at: Sequence[str | Sequence[str]] | None = None,
    *,
    by: Callable[[Node], Hashable] | None = None,
) -> Composition:
    """Splits a graph into modules that compute together what it computes, bit for bit.

    Each cut ends a part: the part consists of all ops that the named nodes depend on and that are in no
    earlier part. The last part has the rest. Other tensors that are read after the cut, such as a skip
    connection's, are passed on by their names, too. What depends only on parameters and on sizes of
    tensors is computed in each part that reads it.

    With ``by`` each op goes into the part that the function says for its (first) output. Ops of one label are
    one part, and the parts run in the order in which they depend on each other.

    Example:
        >>> backbone, head = split(detector, at=[("c3_out", "c4_out", "c5_out")])
        >>> stages = split(detector, by=lambda node: node.qualname.split(".")[1])
        >>> qtrace.export(qtrace.convert(qtrace.calibrate(qtrace.prepare(backbone.module), data)), "b.onnx")

    Args:
        traced: a float graph, flat or hierarchical; it is not changed and shares nothing with the parts.
        at: the cuts in the order of the graph; each is the name of a node, as `qtrace.graph.table` shows it
            for the flat graph, or several names that are cut together.
        by: takes a node of the flat graph, returns a label: text, a number, or what else can be a key.

    Returns:
        The parts, one more than cuts, or one a label; calling it composes them.

    Raises:
        GraphError: when a name is no node of the flat graph, when a part would be empty, when two labels
            depend on each other, or when ``traced`` is prepared or converted.
    """
    if (at is None) == (by is None):
        raise GraphError("split takes either cuts (at=[...]) or a function of the node (by=...).")
    if by is not None and not callable(by):
        raise GraphError(f"by takes a function of a node, not {by!r}.")
    flat = flat_copy(traced, "split")
    if by is not None:
        home = _assign_labels(flat, by)
        return build_parts(flat, home, [None] * (max(home.values()) + 1))
    assert at is not None
    cuts = _read_cuts(at)
    nodes = {n._name: n for n in flat.graph._inputs}
    nodes.update((n._name, n) for e in exprs(flat) for n in e.outputs)
    copyable = copyable_exprs(flat)
    home = {}
    for index, names in enumerate(cuts):
        ends = [_find_node(name, nodes, copyable) for name in names]
        own = _ancestors(ends, home)
        if own.isdisjoint(set(exprs(flat)) - copyable):
            raise GraphError(
                f"nothing is between the cut at {', '.join(cuts[index - 1])} and that at {', '.join(names)}: "
                "list the cuts in the order of the graph, each once."
            )
        home.update(dict.fromkeys((e for e in own if e not in copyable), index))
    rest = [e for e in exprs(flat) if e not in home and e not in copyable]
    if not rest:
        raise GraphError(f"nothing follows the cut at {', '.join(cuts[-1])}: cut before the outputs.")
    home.update(dict.fromkeys(rest, len(cuts)))
    return build_parts(flat, home, [None] * (len(cuts) + 1))


def _read_cuts(at: Sequence[str | Sequence[str]]) -> list[tuple[str, ...]]:
    """Returns each cut as a tuple of names."""
    if isinstance(at, str):
        raise GraphError(f"split takes a list of cuts: at=[{at!r}].")
    cuts = [tuple(cut) if isinstance(cut, (tuple, list)) else (cut,) for cut in at]
    if not cuts or not all(cut and all(isinstance(name, str) for name in cut) for cut in cuts):
        raise GraphError("split takes at least one cut; each is the name of a node, or a tuple of names.")
    return cuts


def _find_node(name: str, nodes: dict[str, Node], copyable: set[Expr]) -> Node:
    """Returns the node ``name``, after which a graph can be cut.

    Raises:
        GraphError: when there is no such node, or no op of a part computes it.
    """
    node = nodes.get(name)
    if node is None:
        near = difflib.get_close_matches(name, nodes, n=3)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else "qtrace.graph.table(flatten(traced)) lists them."
        )
        raise GraphError(f"the flat graph lacks node {name!r}: {hint}")
    if isinstance(node.expr, Input):
        raise GraphError(f"{name} is an input of the graph: nothing is before it; cut after an op.")
    if node.expr in copyable or not isinstance(node, TensorNode):
        raise GraphError(
            f"{name} depends only on parameters, constants and sizes, so each part computes it itself: "
            "cut after an op that depends on the values of the inputs."
        )
    return node


def _ancestors(ends: Sequence[Node], taken: dict[Expr, int]) -> set[Expr]:
    """Returns the exprs that ``ends`` depend on and that are not taken."""
    result: set[Expr] = set()
    stack = list(ends)
    while stack:
        expr = stack.pop().expr
        if expr not in result and expr not in taken and not isinstance(expr, Input):
            result.add(expr)
            stack.extend(expr.inputs)
    return result


def _assign_labels(flat: TracedModule, by: Callable[[Node], Hashable]) -> dict[Expr, int]:
    """Returns the index of the part of each op, for all exprs except `copyable_exprs`.

    Args:
        flat: a flat float graph.
        by: takes the first output of an op, returns the label of its part.

    Raises:
        GraphError: when a label cannot be a key, or when two labels depend on each other.
    """
    copyable = copyable_exprs(flat)
    labels = {expr: _label(by, expr) for expr in exprs(flat) if expr not in copyable and expr.outputs}
    if not labels:
        raise GraphError("split: no op of the graph depends on the values of its inputs.")
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
    """The labels, each after the labels that it reads, and else as they first occur."""
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
