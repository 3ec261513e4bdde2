"""Splits a graph by nodes, by a function of the node, or by what a backend runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from qtrace.errors import GraphError
from qtrace.graph.parts import Composition
from qtrace.graph.parts.split import split as split_graph
from qtrace.graph.types import Node, TracedModule
from qtrace.plugins.arguments import check_arguments
from qtrace.preparation.partition import partition

__all__ = ["split"]


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
        at: the nodes behind which to cut, one name or several together for each cut, in the graph's order.
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
