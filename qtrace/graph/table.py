"""A traced graph as a table of plain text."""

from __future__ import annotations

from typing import Any

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr, is_call_module
from megengine.traced_module.node import Node, TensorNode
from megengine.traced_module.traced_module import InternalGraph

from qtrace.display import format_table
from qtrace.errors import GraphError
from qtrace.graph.walk import module_path, op_label

__all__ = ["table"]


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
