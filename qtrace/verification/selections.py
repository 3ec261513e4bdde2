"""Tensors whose number of rows depends on values: what NMS or a mask keeps, and all that is computed from it.

Where one LSB moves a value over a threshold, graph and runtime keep another number of rows. Their values then
cannot be compared, and the file need not be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qtrace.graph.source_lines import name_with_line
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, op_label

__all__ = ["Shape", "describe_rows", "find_selections", "selects"]

Shape = tuple[int, ...]

# The last part of the labels of ops whose result has as many rows as the values of their inputs say.
_SELECTING = {"cond_take", "nms", "non_zero", "CondTake", "NMSKeep", "NonZero"}


def find_selections(model: TracedModule) -> dict[Node, str]:
    """Finds the tensors whose number of rows depends on values.

    Returns:
        Node -> the first op before it that selects rows, in words, with its source line where that is known.
    """
    selections: dict[Node, str] = {}
    for expr in exprs(model):
        before = [selections[node] for node in expr.inputs if node in selections]
        if before or selects(expr):
            origin = before[0] if before else name_with_line(expr, op_label(expr))
            selections.update((node, origin) for node in expr.outputs)
    return selections


def selects(expr: Expr) -> bool:
    """Whether `expr` keeps rows by their values: as one of `_SELECTING`, or by an index of booleans."""
    label = op_label(expr).rpartition(".")[2]
    masked = any(isinstance(node, TensorNode) and node.dtype == np.bool_ for node in expr.inputs[1:])
    return label in _SELECTING or ("getitem" in label and masked)


def describe_rows(what: str, shapes: Sequence[tuple[Shape, Shape]]) -> str:
    """Says that graph and runtime have other rows of a tensor.

    Args:
        what: "site" or "output" and its name.
        shapes: its shape in the graph and in the runtime, for each batch in which its rows differ.
    """
    mine, theirs = next(((a, b) for a, b in shapes if a != b), shapes[0])
    batches = f"in {len(shapes)} batch{'' if len(shapes) == 1 else 'es'}"
    if mine == theirs:
        return f"{what} has other rows in the runtime than in the graph, or another order of them, {batches}"
    return f"{what} has shape {theirs} in the runtime and {mine} in the graph {batches}"
