"""Orders the exprs of a graph, writes them into it, and renews what MegEngine keeps next to them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction, Expr
from megengine.traced_module.node import Node

from qtrace.errors import GraphError
from qtrace.graph.located_graph import name_failures

__all__ = ["exchange_function", "finish", "order_together", "write_order"]


def write_order(traced: TracedModule, order: Sequence[Expr], removed: set[Expr]) -> None:
    """Makes ``order`` without ``removed`` the exprs of a flat graph, and drops dead ones.

    An expr that reads what a later one computes moves after that.

    Raises:
        GraphError: when an expr needs its own result, or a removed one's output is used.
    """
    graph = traced.graph
    kept = [expr for expr in order if expr not in removed]
    late = _late_read(kept)
    ordered = kept if late is None else order_together(kept, ())
    if ordered is None:
        raise GraphError(f"{late}: it would need its own result.")
    graph._exprs = ordered
    for expr in order:
        if expr in removed:
            _unlink(graph, expr, removed)
    finish(traced)


def _late_read(order: Sequence[Expr]) -> str | None:
    """Returns which expr reads a node that is produced later; None if there is none."""
    unproduced = {n for e in order for n in e.outputs}
    for expr in order:
        node = next((n for n in expr.inputs if n in unproduced), None)
        if node is not None:
            return f"{expr} reads {node._name}, which is produced later"
        unproduced.difference_update(expr.outputs)
    return None


def _unlink(graph: Any, expr: Expr, removed: set[Expr]) -> None:
    outputs = set(graph._outputs)
    for node in expr.outputs:
        readers = [u for u in node.users if u not in removed]
        if readers or node in outputs:
            raise GraphError(
                f"{node._name} cannot be removed: it is still used by {readers or 'the outputs'}."
            )
        graph._namespace.unassociate_name_with_obj(node)
    for node in expr.inputs:
        node.users = [u for u in node.users if u is not expr]


def finish(traced: TracedModule) -> None:
    """Drops dead exprs and renews users, back references and ids, in time linear in the exprs.

    From then on, errors of a direct call name the op that fails.
    """
    name_failures(traced)
    graph = traced.graph
    live = set(graph._outputs)
    live_exprs: list[Expr] = []
    for expr in reversed(graph._exprs):
        if expr._disable_remove or not expr.outputs or any(n in live for n in expr.outputs):
            live_exprs.append(expr)
            live.update(n for n in expr.inputs)
        else:
            for node in expr.outputs:
                graph._namespace.used_names[node._name] = None
    live_exprs.reverse()
    graph._exprs = live_exprs
    users: dict[Node, list[Expr]] = {}
    for expr in live_exprs:
        for node in expr.inputs:
            users.setdefault(node, []).append(expr)
    for node in (*graph._inputs, *(n for e in live_exprs for n in e.outputs)):
        node.users = users.get(node, [])
    traced._update_ref()
    graph._reset_ids()


def exchange_function(traced: TracedModule, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replaces the function ``old`` by ``new``, which takes the same arguments, in every call."""
    for expr in traced.graph._exprs:
        if isinstance(expr, CallFunction) and expr.func is old:
            expr.func = new


def order_together(exprs: Sequence[Expr], groups: Sequence[Sequence[Expr]]) -> list[Expr] | None:
    """Orders exprs so that they compute the same and the members of each group follow each other.

    The order changes only as far as necessary. An in-place method may move past readers of its input, since
    `qtrace.graph.interpreter.interpret` gives its result a value of its own. Nothing moves past an expr
    without outputs.

    Args:
        exprs: all exprs of a flat graph. One that reads what a later one computes moves after that.
        groups: exprs of the graph, none in two groups.

    Returns:
        The order; None if there is none, since a member of a group needs the result of another member,
        directly or through a second group, or an expr needs its own result.
    """
    place = {expr: i for i, expr in enumerate(exprs)}
    unit = list(range(len(exprs)))  # the place of the first member stands for a group
    members = {i: [i] for i in unit}
    for group in groups:
        first, *others = sorted(place[expr] for expr in group)
        for other in others:
            unit[other] = first
            members[first] += members.pop(other)
    return _sort_units(exprs, unit, members)


def _sort_units(exprs: Sequence[Expr], unit: list[int], members: dict[int, list[int]]) -> list[Expr] | None:
    """Sorts the units topologically, the smallest number first among those that are ready."""
    needs = _needs(exprs, unit)
    readers: dict[int, list[int]] = {}
    for number, needed in needs.items():
        for source in needed:
            readers.setdefault(source, []).append(number)
    waiting = {number: len(needed) for number, needed in needs.items()}
    ready = [number for number, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[Expr] = []
    while ready:
        number = heapq.heappop(ready)
        order += [exprs[i] for i in members[number]]
        for reader in readers.get(number, ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    return order if len(order) == len(exprs) else None


def _needs(exprs: Sequence[Expr], unit: list[int]) -> dict[int, set[int]]:
    """Maps each unit to the units that it needs; a unit needs itself if a member needs another member."""
    needs: dict[int, set[int]] = {number: set() for number in unit}
    producers = {node: i for i, expr in enumerate(exprs) for node in expr.outputs}
    barrier: list[int] = []  # the last expr without outputs
    after_barrier: list[int] = []  # the exprs after it
    for i, expr in enumerate(exprs):
        needed = {producers[node] for node in expr.inputs if node in producers}
        needed.update(barrier if expr.outputs else (*barrier, *after_barrier))
        needs[unit[i]].update(unit[j] for j in needed)
        after_barrier.append(i)
        if not expr.outputs:
            barrier, after_barrier = [i], []
    return needs
