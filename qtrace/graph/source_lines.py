"""Source lines of exprs: recorded while tracing, and preserved by copies, edits and files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import megengine
from megengine.module import Module
from megengine.traced_module.expr import Expr
from megengine.traced_module.traced_module import InternalGraph

__all__ = [
    "attach_lines",
    "copy_line",
    "detach_lines",
    "name_with_line",
    "recorded_lines",
    "shown_path",
    "source_line",
]

_ATTRIBUTE = "_qtrace_line"  # of an expr, in memory
_SAVED = "_qtrace_lines"  # of a module, in a file: JSON, since exprs lose attributes there
_SKIPPED = (str(Path(__file__).parent) + os.sep, str(Path(megengine.__file__).parent) + os.sep, "<")
_TRACE = str(Path(__file__).parent / "tracing" / "trace.py")
_MAX_LENGTH = 1000  # of one line's text in a file


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

    InternalGraph._insert = insert
    try:
        yield
    finally:
        InternalGraph._insert = original


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
        return [[table[i][:_MAX_LENGTH] if type(i) is int else "" for i in part] for part in saved["exprs"]]
    except (TypeError, ValueError, LookupError, RecursionError):
        return []
