"""Partitions a graph into parts that a backend runs on integers and parts that it does not.

A device often takes a part of a network only. The parts alternate between ops that the backend supports and
ops that it does not, and run in their order: a part reads only results of earlier parts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from qtrace import ops
from qtrace.config import backends
from qtrace.errors import GraphError
from qtrace.extras.split import Composition
from qtrace.extras.split.split import build_parts, copyable_exprs, flat_copy
from qtrace.extras.split.split import split as split_graph
from qtrace.graph.types import Expr, Node, TracedModule
from qtrace.graph.walk import exprs
from qtrace.plugins.options import check_arguments
from qtrace.preparation.prepare import plan
from qtrace.process import on_engine_thread

_SUPPORTED = frozenset({"int", "fused", "carried"})


@on_engine_thread
def partition(traced: TracedModule, backend: str) -> Composition:
    """Partitions a float graph by what a backend runs on integers.

    An op is supported if ``prepare`` for the backend quantizes it, fuses it into an op that it quantizes, or
    passes its integers on. Each op is in the first part of its sort that all its inputs allow, so no part
    depends on a later one. What depends only on parameters and sizes of tensors is computed in each part
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
        supported: expr -> whether the backend supports it, for all exprs except `copyable_exprs`.
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


@check_arguments
def split(
    traced: TracedModule,
    at: Sequence[str | Sequence[str]] | None = None,
    *,
    by: Callable[[Node], Hashable] | None = None,
    by_backend: str | None = None,
) -> Composition:
    """Splits a model into parts that are calibrated and exported by themselves, as ``qtrace split`` does.

    Args:
        traced: a traced module; it is not changed and shares nothing with the parts.
        at: the nodes after which to cut, one name or several together for each cut, in the graph's order.
        by: takes a node of the flat graph and returns the label of its part, as for `qtrace.graph.split`.
        by_backend: the name of a backend, where support begins or ends for each part.

    Returns:
        The parts in the order in which they run; calling the result computes what ``traced`` computes.

    Raises:
        ConfigError: for an unknown backend.
        GraphError: when not just one way to cut is given, or for cuts that the graph does not have.
    """
    if [at is None, by is None, by_backend is None].count(False) != 1:
        raise GraphError("give one of at, by and by_backend.")
    if by_backend is not None:
        return partition(traced, by_backend)
    return split_graph(traced, at, by=by)
