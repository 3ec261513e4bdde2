"""Tables as plain text: of a graph, and of any rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr, is_call_module
from megengine.traced_module.node import Node, TensorNode
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError
from qtrace.graph.walk import module_path, op_label

__all__ = ["format_table", "table"]

_GAP = "  "
_ELLIPSIS = "…"
_MIN_COLUMN_WIDTH = 6  # in characters, even if the table is too wide then
_NUMBER = re.compile(r"[-+]?[\d.,_]+(e[-+]?\d+)?\s?%?\Z")


def table(traced: TracedModule, max_width: int | None = 160) -> str:
    """Formats one row for each expr of the top graph: id, op, outputs, inputs, module path, shape, dtype.

    Args:
        traced: a traced module; a call of a submodule in a hierarchical graph is one row.
        max_width: largest width in characters; None for no limit.

    Raises:
        GraphError: when ``traced`` is not a traced module.
    """
    if not isinstance(traced, TracedModule):
        raise GraphError(f"table takes a TracedModule, not {type(traced).__name__}.")
    graph: InternalGraph = traced.graph
    inputs = dict.fromkeys(node.expr for node in graph._inputs[1:])
    rows = [_row(expr) for expr in (*inputs, *graph._exprs)]
    rows.append(("", "output", "", ", ".join(n._name for n in graph._outputs), "", "", ""))
    return format_table(("id", "op", "output", "inputs", "module", "shape", "dtype"), rows, max_width)


def _row(expr: Expr) -> tuple[str, ...]:
    tensors = [n for n in expr.outputs if isinstance(n, TensorNode)]
    return (
        str(expr._id),
        op_label(expr),
        ", ".join(n._name for n in expr.outputs),
        _arguments(expr),
        module_path(expr),
        ", ".join(dict.fromkeys(_shape(n) for n in tensors)),
        ", ".join(dict.fromkeys(_dtype(n) for n in tensors)),
    )


def _arguments(expr: Expr) -> str:
    """Formats the arguments as source code; a called module has a column of its own."""
    try:
        args, kwargs = expr.unflatten_args(expr.inputs)
    except AssertionError:  # no argument structure, or a broken one: a table must show that graph too
        return ", ".join(n._name for n in expr.inputs)
    shown = [_text(a) for a in args[1 if is_call_module(expr) else 0 :]]
    while shown and shown[-1] == "None":  # options that were left at their default
        shown.pop()
    return ", ".join(shown + [f"{key}={_text(value)}" for key, value in kwargs.items()])


def _text(value: Any) -> str:
    if isinstance(value, Node):
        return str(value._name)
    if type(value) in (list, tuple):
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{', '.join(_text(v) for v in value)}{right}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        parts = ["" if p is None else _text(p) for p in (value.start, value.stop, value.step)]
        return ":".join(parts if value.step is not None else parts[:2])
    if value is Ellipsis:
        return "..."
    return str(value)


def _shape(node: TensorNode) -> str:
    if node.shape is None:
        return "?"
    return "x".join(str(int(n)) for n in node.shape) or "scalar"


def _dtype(node: TensorNode) -> str:
    return "?" if node.dtype is None else str(getattr(node.dtype, "__name__", node.dtype))


def format_table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], max_width: int | None = 140
) -> str:
    """Formats a table with a header, a rule and one line for each row; aligns numbers to the right.

    Args:
        headers: the names of the columns.
        rows: the cells, converted by ``str``; line breaks in them become spaces.
        max_width: largest width in characters, reached by shortening the widest cells with an ellipsis; None
            for no limit. A table of very many columns stays wider than unreadable.

    Raises:
        ValueError: when a row does not have one cell for each header.
    """
    cells = [[" ".join(str(cell).split()) for cell in row] for row in rows]
    for index, row in enumerate(cells):
        if len(row) != len(headers):
            raise ValueError(f"row {index} has {len(row)} cells, but the table has {len(headers)} columns.")
    columns = list(zip(headers, *cells, strict=True))
    numeric = [any(column[1:]) and all(not c or _NUMBER.match(c) for c in column[1:]) for column in columns]
    widths = _fit([max(map(len, column)) for column in columns], max_width)

    def line(row: Sequence[str]) -> str:
        parts = [_shorten(cell, width) for cell, width in zip(row, widths, strict=True)]
        aligned = [p.rjust(w) if n else p.ljust(w) for p, w, n in zip(parts, widths, numeric, strict=True)]
        return _GAP.join(aligned).rstrip()

    return "\n".join([line(headers), _GAP.join("-" * width for width in widths), *map(line, cells)])


def _fit(widths: list[int], max_width: int | None) -> list[int]:
    """Lowers the widest of ``widths`` to one common limit such that the line fits."""
    if max_width is None:
        return widths
    room = max_width - len(_GAP) * (len(widths) - 1)
    remaining = len(widths)
    limit = max(widths, default=0)
    for width in sorted(widths):  # narrow columns keep their width, the others share the rest
        limit = room // remaining
        if width > limit:
            break
        room -= width
        remaining -= 1
    else:
        return widths
    limit = max(limit, _MIN_COLUMN_WIDTH)
    spare = max(room - limit * remaining, 0)
    result = []
    for width in widths:
        extra = 1 if width > limit and spare > 0 else 0
        spare -= extra
        result.append(min(width, limit + extra))
    return result


def _shorten(text: str, width: int) -> str:
    """Shortens a sentence at its end, and a name in its middle, whose ends say more."""
    if len(text) <= width:
        return text
    if " " in text:
        return text[: width - 1] + _ELLIPSIS
    head = width // 2
    return text[:head] + _ELLIPSIS + text[len(text) - (width - 1 - head) :]
