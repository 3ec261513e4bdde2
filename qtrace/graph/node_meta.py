"""Notes of a user on nodes, preserved by copies, edits, passes and files.

MegEngine drops what it does not know of a node when it saves a model. So the notes are written into an
attribute of the module that has the graph, as JSON text, and taken back when the file is loaded.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from megengine.module import Module
from megengine.traced_module.node import Node
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError

__all__ = ["META", "attach_meta", "detach_meta", "meta", "move_meta", "own_meta"]

META = "_qtrace_meta"  # of a node, in memory
_SAVED = "_qtrace_metas"  # of a module, in a file
_MAX_DEPTH = 20


def meta(node: Node) -> dict[str, Any]:
    """Returns the notes on a node: a dictionary of yours, empty at first.

    It belongs to the node: what is written into it stays through copies, `flatten`, edits, ``prepare``,
    ``convert``, `save` and `load`. What an edit or a pass puts in the place of a node takes its notes.

    Example:
        >>> meta(node)["stage"] = "backbone"

    Args:
        node: a node of a traced module.

    Returns:
        The dictionary. A model is saved if it holds plain data alone: text, numbers, True, False, None, and
        lists and dictionaries of them with text as keys.

    Raises:
        GraphError: when ``node`` is no node.
    """
    if not isinstance(node, Node):
        raise GraphError(f"meta takes a node of a traced module, not {type(node).__name__}.")
    notes: dict[str, Any] = node.__dict__.setdefault(META, {})
    return notes


def own_meta(node: Node) -> None:
    """Gives a copy of a node notes of its own, so that both change independently."""
    if META in node.__dict__:
        node.__dict__[META] = copy.deepcopy(node.__dict__[META])


def move_meta(old: Node, new: Node) -> None:
    """Gives ``new``, which takes the place of ``old``, the notes on ``old``."""
    if notes := old.__dict__.get(META):
        meta(new).update(copy.deepcopy(notes))


def attach_meta(root: Module) -> None:
    """Writes the notes on all nodes below ``root`` into attributes of its modules, for a file.

    Raises:
        GraphError: naming the node whose notes are not plain data.
    """
    for module in root.modules():
        graphs = (getattr(module, "argdef_graph_map", None) or {}).values()
        notes = [
            {str(i): _checked(n) for i, n in enumerate(_nodes(g)) if n.__dict__.get(META)} for g in graphs
        ]
        if any(notes):
            setattr(module, _SAVED, json.dumps(notes))


def detach_meta(root: Module) -> None:
    """Moves the notes from the attributes that `attach_meta` wrote to the nodes.

    Notes of a file that are anything but plain data are dropped: nothing of qtrace reads them.
    """
    for module in root.modules():
        text = module.__dict__.pop(_SAVED, None)
        if text is None:
            continue
        graphs = (getattr(module, "argdef_graph_map", None) or {}).values()
        for graph, notes in zip(graphs, _parsed(text), strict=False):
            nodes = _nodes(graph)
            for index, own in notes.items():
                if index.isdecimal() and int(index) < len(nodes) and isinstance(own, dict):
                    nodes[int(index)].__dict__[META] = own


def _nodes(graph: InternalGraph) -> list[Node]:
    return [*graph._inputs, *(node for expr in graph._exprs for node in expr.outputs)]


def _checked(node: Node) -> dict[str, Any]:
    notes: dict[str, Any] = node.__dict__[META]
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


def _parsed(text: Any) -> list[dict[str, Any]]:
    try:
        saved = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return []
    right = isinstance(saved, list) and all(isinstance(notes, dict) for notes in saved)
    return saved if right else []
