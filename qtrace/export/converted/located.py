"""Where a refusal stands: the node, what it calls, and the line of the user's code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from qtrace.errors import ExportError
from qtrace.graph.source_lines import source_line
from qtrace.graph.types import Constant, Expr, GetAttr, Input, TensorNode, TracedModule
from qtrace.graph.walk import exprs, op_label, users

__all__ = ["LocatedError", "locate_by_name", "located", "place", "refusal", "site_expr"]


class LocatedError(ExportError):
    """An export error that says which op it is about."""


def place(expr: Expr, with_name: bool = True) -> str:
    """``expr`` in words, as it stands in brackets behind a refusal: ``relu_out, F.relu, net.py:12``."""
    name = [expr.outputs[0].name] if with_name and expr.outputs else []
    return ", ".join(part for part in (*name, op_label(expr), source_line(expr)) if part)


def locate_by_name(error: ExportError, converted: TracedModule) -> ExportError:
    """Adds op and line to an error that begins with the name of a site or node and is not located yet."""
    if isinstance(error, LocatedError):
        return error
    found = re.match(r"(?:site |input |output )?(\w+)", str(error))
    wanted = found.group(1) if found else ""
    for expr in exprs(converted):
        known = any(n.name == wanted for n in expr.outputs)
        if known and not isinstance(expr, Constant):
            about = next(users(expr.outputs[0]), expr) if isinstance(expr, GetAttr) else expr
            return refusal(error, about)
    return error


@contextmanager
def located(expr: Expr) -> Iterator[None]:
    """Adds to an `ExportError` that leaves the block which op it is about, with the op's line.

    An error that was located in a block inside of this one stays as it is.
    """
    try:
        yield
    except ExportError as error:
        if isinstance(error, LocatedError):
            raise
        raise refusal(error, expr) from error


def refusal(error: ExportError | str, expr: Expr) -> LocatedError:
    """The sentence ``error`` with ``expr`` behind it: what of name, op and line it does not begin with."""
    text, name, label = str(error).rstrip("."), expr.outputs[0].name, op_label(expr)
    if text.startswith(f"{name}: {label} "):
        where = source_line(expr)
    else:
        where = place(expr, with_name=not text.startswith(f"{name}: "))
    return LocatedError(f"{text} (in {where})." if where else f"{text}.")


def site_expr(source: TensorNode, out: TensorNode) -> Expr:
    """The op that a site belongs to: what computes its value, or the first reader of a parameter or input.

    Args:
        source: the node whose value is rounded.
        out: the node of the rounded value.
    """
    if isinstance(source.expr, (GetAttr, Constant, Input)):
        return next(users(out), source.expr)
    return source.expr
