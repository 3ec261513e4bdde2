"""Describes the failure of an op of a graph: its node, its source line and the tensors that it read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megengine.traced_module.expr import Expr

from qtrace.graph.failures import short
from qtrace.graph.source_lines import name_with_line, source_line
from qtrace.graph.walk import op_label

__all__ = ["describe_failure"]


def describe_failure(expr: Expr, inputs: Sequence[Any], error: Exception, advice: str = "") -> str:
    """Returns a sentence about an op that fails, such as ``a_out (Conv2d, net.py:3) fails on x (1, 3): ...``.

    Args:
        expr: the op; it may have no outputs yet.
        inputs: for each input of ``expr`` its value or its type; only those with shape and dtype are shown.
        error: the exception of the op.
        advice: what to do about the failure.
    """
    label = op_label(expr)
    if expr.outputs:
        place = name_with_line(expr, label)
    else:
        line = source_line(expr)
        place = f"the inserted {label}{f' ({line})' if line else ''}"
    tensors = [(node, v) for node, v in zip(expr.inputs, inputs, strict=True) if hasattr(v, "dtype")]
    sizes = ", ".join(f"{n.name} {tuple(int(i) for i in v.shape)} {_dtype_name(v)}" for n, v in tensors)
    cause = f"({short(error)})" if advice else short(error)
    return f"{place} fails{f' on {sizes}' if sizes else ''}: {advice}{' ' if advice else ''}{cause}."


def _dtype_name(value: Any) -> str:
    return str(getattr(value.dtype, "name", value.dtype))
