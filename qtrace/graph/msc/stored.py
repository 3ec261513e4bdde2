"""Where the tensors of a document are stored in the module: by their names, or as a node's attribute says."""

from __future__ import annotations

import json
from dataclasses import dataclass

from qtrace.errors import GraphError
from qtrace.graph.msc.document import MSCNode

__all__ = ["StoredPlace", "default_place", "stored_place"]

_KINDS = ("parameter", "buffer", "constant")
_BUFFERS = ("mean", "var")
_ENDINGS = ("weight", "bias")


@dataclass(frozen=True)
class StoredPlace:
    """Where a tensor is stored.

    Attributes:
        path: its path in the module.
        kind: ``parameter``, ``buffer`` (no gradient), or ``constant`` of the graph.
    """

    path: str
    kind: str


def default_place(name: str, role: str) -> StoredPlace:
    """Returns the place of a weight of which the node says nothing: ``conv_weight`` is ``conv.weight``."""
    head, _, ending = name.rpartition("_")
    path = f"{head}.{ending}" if head and ending in _ENDINGS else name
    return StoredPlace(path, "buffer" if role in _BUFFERS else "parameter")


def stored_place(node: MSCNode, role: str) -> StoredPlace:
    """Returns the place of a weight.

    Raises:
        GraphError: when the node's attribute ``stored`` is damaged; the message is a clause.
    """
    default = default_place(node.weights[role].name, role)
    if "stored" not in node.attrs:
        return default
    try:
        places = json.loads(node.attrs["stored"])
        path, kind = places.get(role, (default.path, default.kind))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise GraphError(f"its attribute 'stored' is damaged ({type(error).__name__})") from error
    if not isinstance(path, str) or kind not in _KINDS:
        raise GraphError(f"its attribute 'stored' has no place for {role!r}")
    return StoredPlace(path, kind)
