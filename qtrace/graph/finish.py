"""Writes a new list of exprs into a graph, and renews what MegEngine keeps beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction, Expr
from megengine.traced_module.node import Node

from qtrace.errors import GraphError
from qtrace.graph.located_graph import name_failures
from qtrace.graph.ordering import order_together

__all__ = ["exchange_function", "finish", "write_order"]


def write_order(traced: TracedModule, order: Sequence[Expr], removed: set[Expr]) -> None:
    """Makes ``order`` without ``removed`` the exprs of a flat graph, and drops dead ones.

    An expr that reads what a later one computes moves after that.

    Raises:
        GraphError: when an expr needs its own result, or a removed one's output is used.
    """
    graph = traced.graph
    kept = [expr for expr in order if expr not in removed]
    late = _late_read(kept)
    if late is not None:
        kept = order_together(kept, ())
    if kept is None:
        raise GraphError(f"{late}: it would need its own result.")
    graph._exprs = kept
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
