"""Reorders a graph's exprs so that the members of chosen groups follow each other."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from qtrace.graph.types import Expr

__all__ = ["order_together"]


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
    return _sorted(exprs, unit, members)


def _sorted(exprs: Sequence[Expr], unit: list[int], members: dict[int, list[int]]) -> list[Expr] | None:
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
