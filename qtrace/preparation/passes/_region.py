"""The part of a graph that a config's ``region`` names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from qtrace.config import Region
from qtrace.errors import ConfigError
from qtrace.graph.types import Expr, TracedModule
from qtrace.graph.walk import exprs, module_path
from qtrace.preparation.passes._matching import any_matches, closure, expr_names

__all__ = ["find_region"]

_NEAREST_NAMES = 5  # in the message about a name that does not exist


def find_region(traced: TracedModule, region: Region, place: Callable[..., str]) -> set[Expr]:
    """Finds the exprs of a region: those on a path from its inputs to its outputs, both ends included.

    Args:
        traced: a flat, expanded graph.
        region: name patterns of the inputs and outputs of the region.
        place: `QConfig.place`: gives the source of the region or of one of its ends, for messages.

    Raises:
        ConfigError: for a pattern that no node and no module has, or a region without an op.
    """
    order = exprs(traced)
    members = set(order)
    if region.outputs is not None:
        ends = _find_named(traced, region.outputs, _subject(place, "outputs"))
        members &= closure(ends, lambda e: [n.expr for n in e.inputs])
    if region.inputs is not None:
        starts = _find_named(traced, region.inputs, _subject(place, "inputs"))
        members &= closure(starts, lambda e: [u for n in e.outputs for u in n.users])
    if not any(e in members for e in order):
        raise ConfigError(f"{place('region')}: no op lies between the inputs and the outputs of the region.")
    return members


def _subject(place: Callable[..., str], end: str) -> str:
    """Returns the subject of a message about an end of the region: an argument, or a key with its file."""
    source = place(f"region.{end}", "region")
    return source if source == f"argument {end}" else f"{source}: region.{end}"


def _find_named(traced: TracedModule, patterns: Sequence[str], origin: str) -> list[Expr]:
    """Finds the exprs whose node or module a pattern matches, in the order of ``patterns``."""
    names: dict[str, list[Expr]] = {}
    for expr, own in expr_names(traced).items():
        parts = module_path(expr).split(".")
        for name in (*own, *(".".join(parts[:end]) for end in range(1, len(parts)))):
            names.setdefault(name, []).append(expr)
    named: list[Expr] = []
    for pattern in patterns:
        matched = [name for name in names if any_matches([pattern], [name])]
        if not matched:
            nearest = difflib.get_close_matches(pattern, names, n=_NEAREST_NAMES, cutoff=0.0)
            raise ConfigError(
                f"{origin} names {pattern!r}, which is no node or module here; the nearest names are "
                f"{', '.join(nearest)}."
            )
        named += [e for name in matched for e in names[name]]
    return named
