"""An order of a graph's exprs in which chosen ones stand together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from qtrace.graph.types import Expr, Node

__all__ = ["order_together"]


def order_together(exprs: Sequence[Expr], groups: Sequence[Sequence[Expr]]) -> list[Expr] | None:
    """The exprs in an order that computes the same, with the members of each group one after the other.

    Beyond that the order stays what it is: what can stand first does so if it stood first. Methods in place
    do not bind it, for `qtrace.graph.interpreter.interpret` gives their result a value of its own; an expr
    without outputs does, whatever it may do.

    Args:
        exprs: all exprs of a flat graph, in an order in which they can be computed.
        groups: exprs among them, none in two groups.

    Returns:
        None where there is no such order: one member needs what another gives, or what comes from it through
        a second group.
    """
    place = {expr: i for i, expr in enumerate(exprs)}
    unit = list(range(len(exprs)))  # the place of the first member stands for a group
    members = {i: [i] for i in unit}
    for group in groups:
        first, *others = sorted(place[expr] for expr in group)
        for other in others:
            unit[other] = first
            members[first] += members.pop(other)
    return _sorted(exprs, unit, members)


def _sorted(exprs: Sequence[Expr], unit: list[int], members: dict[int, list[int]]) -> list[Expr] | None:
    """The units in topological order, the smallest first among those that are ready."""
    needs = _needs(exprs, unit)
    readers: dict[int, list[int]] = {}
    for one, needed in needs.items():
        for other in needed:
            readers.setdefault(other, []).append(one)
    waiting = {one: len(needed) for one, needed in needs.items()}
    ready = [one for one, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[Expr] = []
    while ready:
        one = heapq.heappop(ready)
        order += [exprs[i] for i in members[one]]
        for reader in readers.get(one, ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    return order if len(order) == len(exprs) else None


def _needs(exprs: Sequence[Expr], unit: list[int]) -> dict[int, set[int]]:
    """For each unit, those that come first; itself where one member needs another."""
    needs: dict[int, set[int]] = {one: set() for one in unit}
    maker: dict[Node, int] = {}
    wall: list[int] = []  # the last expr without outputs
    since: list[int] = []  # the exprs since then
    for i, expr in enumerate(exprs):
        needed = {maker[node] for node in expr.inputs if node in maker}
        needed.update(wall if expr.outputs else (*wall, *since))
        needs[unit[i]].update(unit[j] for j in needed)
        maker.update((node, i) for node in expr.outputs)
        since.append(i)
        if not expr.outputs:
            wall, since = [i], []
    return needs
