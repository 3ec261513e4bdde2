"""The part of a graph that a config's ``region`` names."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from qtrace.config import Region
from qtrace.config.base import hint
from qtrace.errors import ConfigError
from qtrace.graph.types import Expr, TracedModule
from qtrace.graph.walk import exprs, module_path
from qtrace.passes._selectors import closure

__all__ = ["inside"]


def inside(traced: TracedModule, region: Region, origin: str) -> set[int]:
    """The ids of the exprs of a region: on a way from its inputs to its outputs, both ends included.

    Args:
        traced: a flat, expanded graph.
        region: where it begins and ends.
        origin: where the region was written, for messages.

    Raises:
        ConfigError: for a pattern that no node and no module has, or a region without an op.
    """
    every = exprs(traced)
    found = {id(e) for e in every}
    if region.outputs is not None:
        ends = _named(traced, region.outputs, f"{origin}: region.outputs")
        found &= closure(ends, lambda e: [n.expr for n in e.inputs])
    if region.inputs is not None:
        starts = _named(traced, region.inputs, f"{origin}: region.inputs")
        found &= closure(starts, lambda e: [u for n in e.outputs for u in n.users])
    if not any(id(e) in found for e in every):
        raise ConfigError(f"{origin}: no op lies between the inputs and the outputs of the region.")
    return found


def _named(traced: TracedModule, patterns: Sequence[str], origin: str) -> list[Expr]:
    every = exprs(traced)
    sources = {n.expr for n in traced.graph.inputs}
    names: dict[str, list[Expr]] = {}
    for expr in (*sources, *every):
        for node in expr.outputs:
            names.setdefault(node.name, []).append(expr)
        path = module_path(expr)
        while path:
            names.setdefault(path, []).append(expr)
            path = path.rpartition(".")[0]
    found: list[Expr] = []
    for pattern in patterns:
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            # Module paths first: people know those.
            likely = hint(pattern, sorted(names, key=lambda n: (-n.count("."), n))[:20])
            raise ConfigError(f"{origin} names {pattern!r}, which is no node or module here{likely}")
        found += [e for name in matched for e in names[name]]
    return found
