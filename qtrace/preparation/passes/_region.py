"""The part of a graph that a config's ``region`` names."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Sequence

from qtrace.config import Region
from qtrace.errors import ConfigError
from qtrace.graph.types import Expr, TracedModule
from qtrace.graph.walk import exprs, module_path
from qtrace.preparation.passes._selectors import closure

__all__ = ["find_region"]

_NEAREST = 5


def find_region(traced: TracedModule, region: Region, place: Callable[..., str]) -> set[Expr]:
    """Finds the exprs of a region: those on a way from its inputs to its outputs, both ends included.

    Args:
        traced: a flat, expanded graph.
        region: where it begins and ends.
        place: `QConfig.place`: where the region or one of its ends was written, for messages.

    Raises:
        ConfigError: for a pattern that no node and no module has, or a region without an op.
    """
    every = exprs(traced)
    members = set(every)
    if region.outputs is not None:
        ends = _named(traced, region.outputs, _subject(place, "outputs"))
        members &= closure(ends, lambda e: [n.expr for n in e.inputs])
    if region.inputs is not None:
        starts = _named(traced, region.inputs, _subject(place, "inputs"))
        members &= closure(starts, lambda e: [u for n in e.outputs for u in n.users])
    if not any(e in members for e in every):
        raise ConfigError(f"{place('region')}: no op lies between the inputs and the outputs of the region.")
    return members


def _subject(place: Callable[..., str], end: str) -> str:
    """What names an end of the region: an argument of the call, or a key at a place in a file."""
    where = place(f"region.{end}", "region")
    return where if where == f"argument {end}" else f"{where}: region.{end}"


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
            near = difflib.get_close_matches(pattern, names, n=_NEAREST, cutoff=0.0)
            raise ConfigError(
                f"{origin} names {pattern!r}, which is no node or module here; the nearest names are "
                f"{', '.join(near)}."
            )
        found += [e for name in matched for e in names[name]]
    return found
