"""The option ``allow_float``: layers that a file computes in float, with weights that the graph rounded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import users

__all__ = ["float_kinds", "only_floats_read"]


def float_kinds(names: str | Iterable[str]) -> frozenset[str]:
    """Returns the kinds of ops that ``allow_float`` names.

    Raises:
        ExportError: for a name that is no kind of op.
    """
    kinds = frozenset((names,) if isinstance(names, str) else names)
    known = ops.kinds()
    for name in sorted(kinds - set(known)):
        near = difflib.get_close_matches(name, known, 3)
        hint = f"did you mean {' or '.join(near)}" if near else "qtrace.explain lists those of a graph"
        raise ExportError(f"allow_float names {name!r}, which is no kind of op: {hint}.")
    return kinds


def only_floats_read(node: TensorNode, kinds: frozenset[str]) -> bool:
    """Whether every layer that reads ``node``, a weight or a bias, is of one of ``kinds``."""
    calls = [ops.read(user) for user in users(node)]
    return bool(calls) and all(call is not None and call.kind in kinds for call in calls)
