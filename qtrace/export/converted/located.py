"""Adds to a refusal the node, its op, and the line of the user's code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from qtrace.errors import ExportError
from qtrace.graph.notes import source_line
from qtrace.graph.types import Constant, Expr, GetAttr, Input, TensorNode, TracedModule
from qtrace.graph.walk import exprs, op_label, users

__all__ = ["LocatedError", "locate_by_name", "located", "place", "refusal", "site_expr"]


class LocatedError(ExportError):
    """An export error that names the op that caused it."""


def place(expr: Expr, with_name: bool = True) -> str:
    """Describes ``expr`` for the brackets after a refusal: ``relu_out, F.relu, net.py:12``."""
    name = [expr.outputs[0].name] if with_name and expr.outputs else []
    return ", ".join(part for part in (*name, op_label(expr), source_line(expr)) if part)


def locate_by_name(error: ExportError, converted: TracedModule) -> ExportError:
    """Adds op and line to an error that begins with the name of a site or node, unless it has them."""
    if isinstance(error, LocatedError):
        return error
    match = re.match(r"(?:site |input |output )?(\w+)", str(error))
    name = match.group(1) if match else ""
    for expr in exprs(converted):
        known = any(n.name == name for n in expr.outputs)
        if known and not isinstance(expr, Constant):
            about = next(users(expr.outputs[0]), expr) if isinstance(expr, GetAttr) else expr
            return refusal(error, about)
    return error


@contextmanager
def located(expr: Expr) -> Iterator[None]:
    """Adds op and line of ``expr`` to an `ExportError` that leaves the block.

    An error that an inner block located stays as it is.
    """
    try:
        yield
    except ExportError as error:
        if isinstance(error, LocatedError):
            raise
        raise refusal(error, expr) from error


def refusal(error: ExportError | str, expr: Expr) -> LocatedError:
    """Appends to ``error`` name, op and line of ``expr``, without those that it begins with."""
    text, name, label = str(error).rstrip("."), expr.outputs[0].name, op_label(expr)
    if text.startswith(f"{name}: {label} "):
        position = source_line(expr)
    else:
        position = place(expr, with_name=not text.startswith(f"{name}: "))
    return LocatedError(f"{text} (in {position})." if position else f"{text}.")


def site_expr(source: TensorNode, out: TensorNode) -> Expr:
    """Returns the op of a site: that which computes its value, or the first reader of a parameter or input.

    Args:
        source: the node whose value is rounded.
        out: the node of the rounded value.
    """
    if isinstance(source.expr, (GetAttr, Constant, Input)):
        return next(users(out), source.expr)
    return source.expr
