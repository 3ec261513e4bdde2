"""Notes on nodes that copies, edits, passes and files preserve: a user's own, and source lines.

MegEngine pickles a fixed list of a node's attributes. So nodes are pickled with one more: their notes as JSON
text, which `meta` reads when it is first asked for them. Whoever pickles a model keeps its notes.
"""

from __future__ import annotations

import copy
import copyreg
import json
import os
import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import megengine
from megengine.module import Module
from megengine.traced_module.expr import Expr
from megengine.traced_module.node import ModuleNode, Node, TensorNode
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError
from qtrace.graph.walk import patched

# Notes of a user on nodes, preserved by copies, edits, passes and files.

SAVED_META = "_qtrace_notes"
"""The attribute of a node in a file that has its notes as text."""

_META = "_qtrace_meta"  # in memory


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
    try:
        plain = _is_plain(notes)
    except RecursionError:  # such as a list that holds itself
        plain = False
    if not plain:
        raise GraphError(
            f"the notes on node {node._name!r} are {reprlib.repr(notes)}: a file holds text, numbers, "
            "True, False, None, and lists and dictionaries of them with text as keys."
        )
    return notes


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _parsed(text: Any) -> dict[str, Any]:
    """Returns the notes of a file; none if they are damaged, since nothing of qtrace reads them."""
    try:
        notes = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}


# Source lines of exprs: recorded while tracing, and preserved by copies, edits and files.

_ATTRIBUTE = "_qtrace_line"  # of an expr, in memory
_SAVED = "_qtrace_lines"  # of a module, in a file: JSON, since exprs lose attributes there
_SKIPPED = (str(Path(__file__).parent) + os.sep, str(Path(megengine.__file__).parent) + os.sep, "<")
_TRACE = str(Path(__file__).parent / "tracing" / "trace.py")


def source_line(expr: Expr) -> str:
    """Returns file and line of the call in the user's code that recorded ``expr``; "" if unknown."""
    return str(getattr(expr, _ATTRIBUTE, ""))


def copy_line(old: Expr, new: Expr) -> None:
    """Gives ``new``, which replaces ``old`` or belongs to it, the line of ``old``, if it has one."""
    setattr(new, _ATTRIBUTE, source_line(old))


def name_with_line(expr: Expr, label: str) -> str:
    """Names ``expr`` for a message: ``relu_out (F.relu, net.py:12)``, without the line if it is unknown."""
    line = source_line(expr)
    return f"{expr.outputs[0].name} ({label}{f', {line}' if line else ''})"


@contextmanager
def recorded_lines() -> Iterator[None]:
    """Records a line for every expr that MegEngine's tracer records within the block."""
    original = InternalGraph._insert

    def insert(graph: InternalGraph, expr: Expr) -> None:
        original(graph, expr)
        line = _user_line(sys._getframe(1))
        if line:
            setattr(expr, _ATTRIBUTE, line)

    with patched(InternalGraph, _insert=insert):
        yield


def _user_line(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        if frame.f_code.co_filename == _TRACE:
            return ""  # the layer that is traced is MegEngine's own: after this frame is the call of `trace`
        frame = frame.f_back
    return "" if frame is None else f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def shown_path(file: str) -> str:
    """Returns ``file`` relative to its folder in ``sys.path``, so that saved files contain no home folder."""
    file = file if file.startswith("<") else os.path.abspath(file)
    roots = [os.path.abspath(p) + os.sep for p in sys.path]
    inside = [r for r in roots if file.startswith(r)]
    return file[len(max(inside, key=len)) :] if inside else Path(file).name


def attach_lines(root: Module) -> None:
    """Writes the lines of all exprs below ``root`` into attributes of its modules, for a file."""
    for module in root.modules():
        graphs = getattr(module, "argdef_graph_map", None) or {}
        lines = [[source_line(e) for e in graph._exprs] for graph in graphs.values()]
        if any(any(of_graph) for of_graph in lines):
            setattr(module, _SAVED, _packed(lines))


def detach_lines(root: Module) -> None:
    """Moves the lines from the attributes that `attach_lines` wrote to the exprs."""
    for module in root.modules():
        text = module.__dict__.pop(_SAVED, None)
        if text is None:
            continue
        graphs = (getattr(module, "argdef_graph_map", None) or {}).values()
        for graph, lines in zip(graphs, _unpacked(text), strict=False):
            for expr, line in zip(graph._exprs, lines, strict=False):
                if line:
                    setattr(expr, _ATTRIBUTE, line)


def _packed(lines: list[list[str]]) -> str:
    table = {line: i for i, line in enumerate(dict.fromkeys(line for part in lines for line in part))}
    return json.dumps({"lines": list(table), "exprs": [[table[line] for line in part] for part in lines]})


def _unpacked(text: Any) -> list[list[str]]:
    """Returns the lines of each graph; none if a file has anything else, since nothing depends on them."""
    try:
        saved = json.loads(text)
        table = [line if type(line) is str else "" for line in saved["lines"]]
        return [[table[i] if type(i) is int else "" for i in part] for part in saved["exprs"]]
    except (TypeError, ValueError, LookupError, RecursionError):
        return []
