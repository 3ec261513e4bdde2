"""Notes of a user on nodes, preserved by copies, edits, passes and files.

MegEngine pickles a fixed list of a node's attributes. So nodes are pickled with one more: their notes as JSON
text, which `meta` reads when it is first asked for them. Whoever pickles a model keeps its notes.
"""

from __future__ import annotations

import copy
import copyreg
import json
from typing import Any

from megengine.traced_module.node import ModuleNode, Node, TensorNode

from qtrace.errors import GraphError

__all__ = ["SAVED_META", "meta", "move_meta", "own_meta"]

SAVED_META = "_qtrace_notes"
"""The attribute of a node in a file that has its notes as text."""

_META = "_qtrace_meta"  # in memory
_MAX_DEPTH = 20


def meta(node: Node) -> dict[str, Any]:
    """Returns the notes on a node: a dictionary of yours, empty at first.

    It belongs to the node: what is written into it stays through copies, pickles, `flatten`, edits,
    `Transformer`, ``prepare``, ``convert``, `save` and `load`. What replaces a node takes its notes.

    Example:
        >>> meta(node)["stage"] = "backbone"

    Args:
        node: a node of a traced module.

    Returns:
        The dictionary. A model is saved or pickled if it holds only plain data: text, numbers, True, False,
        None, and lists and dictionaries of them with text as keys.

    Raises:
        GraphError: when ``node`` is no node.
    """
    if not isinstance(node, Node):
        raise GraphError(f"meta takes a node of a traced module, not {type(node).__name__}.")
    saved = node.__dict__.pop(SAVED_META, None)
    notes: dict[str, Any] = node.__dict__.setdefault(_META, {} if saved is None else _parsed(saved))
    return notes


def own_meta(node: Node) -> None:
    """Gives a copy of a node notes of its own, so that both change independently."""
    if _META in node.__dict__:
        node.__dict__[_META] = copy.deepcopy(node.__dict__[_META])


def move_meta(old: Node, new: Node) -> None:
    """Gives ``new``, which takes the place of ``old``, the notes on ``old``."""
    if {SAVED_META, _META} & old.__dict__.keys():
        meta(new).update(copy.deepcopy(meta(old)))


def _reduce(node: Node) -> tuple[Any, ...]:
    """Tells pickle what a node is: what MegEngine says, and the notes on it.

    Raises:
        GraphError: when the notes are not plain data.
    """
    state = node.__getstate__()
    if SAVED_META in node.__dict__:
        state[SAVED_META] = node.__dict__[SAVED_META]
    elif node.__dict__.get(_META):
        state[SAVED_META] = json.dumps(_checked(node))
    return copyreg.__newobj__, (type(node),), state  # type: ignore[attr-defined]


for _cls in (TensorNode, ModuleNode):
    copyreg.pickle(_cls, _reduce)


def _checked(node: Node) -> dict[str, Any]:
    notes: dict[str, Any] = node.__dict__[_META]
    if not _is_plain(notes, 0):
        raise GraphError(
            f"the notes on node {node._name!r} are {notes!r}: a file holds text, numbers, True, False, None, "
            "and lists and dictionaries of them with text as keys."
        )
    return notes


def _is_plain(value: Any, depth: int) -> bool:
    if depth > _MAX_DEPTH:
        return False
    if type(value) is dict:
        return all(type(key) is str and _is_plain(each, depth + 1) for key, each in value.items())
    if type(value) is list:
        return all(_is_plain(each, depth + 1) for each in value)
    return value is None or type(value) in (bool, int, float, str)


def _parsed(text: Any) -> dict[str, Any]:
    """Returns the notes of a file; none if they are damaged, since nothing of qtrace reads them."""
    try:
        notes = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}
