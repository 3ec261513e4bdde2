"""Partitions a graph into parts that a backend runs on integers and parts that it does not.

A device often takes a part of a network only. The parts alternate between ops that the backend supports and
ops that it does not, and run in their order: a part reads results of earlier parts alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from qtrace import ops
from qtrace.config import backends
from qtrace.graph.parts import Composition
from qtrace.graph.parts.build import build_parts, copyable_exprs, flat_copy
from qtrace.graph.types import Expr, Node, TracedModule
from qtrace.graph.walk import exprs
from qtrace.preparation.prepare import plan
from qtrace.process.thread import on_engine_thread

__all__ = ["partition"]

_SUPPORTED = frozenset({"int", "fused", "carried"})


@on_engine_thread
def partition(traced: TracedModule, backend: str) -> Composition:
    """Partitions a float graph by what a backend runs on integers.

    An op is supported if ``prepare`` for the backend quantizes it, fuses it into an op that it quantizes, or
    passes its integers on. Each op is in the first part of its sort that all its inputs allow, so no part
    depends on a later one. What depends on parameters and sizes of tensors alone is computed in each part
    that reads it.

    Args:
        traced: a float graph, flat or hierarchical; it is not changed and shares nothing with the parts.
        backend: the name of the backend, such as ``ncnn``.

    Returns:
        The parts, each with ``supported``; calling the result computes what ``traced`` computes, bit for bit.

    Raises:
        ConfigError: for an unknown backend.
        GraphError: when ``traced`` is no traced module, or is prepared or converted.
    """
    backends.get(backend)
    flat = flat_copy(traced, "partition")
    support = _find_support(flat, backend)
    level = assign_levels(flat, support)
    used = sorted({level[e] for e in level}) or [0]
    index = {number: i for i, number in enumerate(used)}
    home = {expr: index[number] for expr, number in level.items()}
    return build_parts(flat, home, [number % 2 == 0 for number in used])


def assign_levels(flat: TracedModule, supported: Mapping[Expr, bool]) -> dict[Expr, int]:
    """Assigns a level to each expr that belongs to a part: even if it is supported, odd if it is not.

    The level is the lowest that is not below that of any expr whose result is read, directly or through
    sizes. Exprs of one level form a part.

    Args:
        flat: a flat traced module.
        supported: expr -> whether the backend supports it, for all exprs but those of `copyable_exprs`.
    """
    level: dict[Expr, int] = {}
    lowest: dict[Node, int] = {}
    for expr in exprs(flat):
        floor = max((lowest.get(n, 0) for n in expr.inputs), default=0)
        if expr in supported:
            floor += (floor % 2 == 0) != supported[expr]
            level[expr] = floor
        lowest.update((n, floor) for n in expr.outputs)
    return level


def _find_support(flat: TracedModule, backend: str) -> dict[Expr, bool]:
    """Finds the exprs that the backend supports, of those that belong to a part.

    ``prepare`` folds BatchNorms, and makes one op of a function in pieces. A BatchNorm that it folded belongs
    to its layer, and a piece to the op that reads it.
    """
    states = {name: note.state for note in plan(flat, {"backend": backend}).notes for name in note.gives}
    copyable = copyable_exprs(flat)
    support: dict[Expr, bool] = {}
    unplanned: list[Expr] = []
    for expr in exprs(flat):
        if expr in copyable:
            continue
        state = next((states[n.name] for n in expr.outputs if n.name in states), None)
        if state is None:
            unplanned.append(expr)
        else:
            support[expr] = state in _SUPPORTED
    pieces = []
    for expr in unplanned:
        call = ops.read(expr)
        if call is not None and call.kind == "batch_norm" and call.inputs[0].expr in support:
            support[expr] = support[call.inputs[0].expr]
        else:
            pieces.append(expr)
    for expr in reversed(pieces):
        support[expr] = all(support.get(u, True) for n in expr.outputs for u in n.users)
    return support
