"""Finds where a graph selects: ops that rank scores, suppress boxes, or pick rows by a mask, by structure.

A *selection* turns values into places: a top-k, a sort, an arg-max, a suppression, a boolean index.
A small error of a score may exchange two places, and then all rows after them are others, although each row
may be right. So a selection is judged by its places, and the rows after it by rows: `qtrace.outputs.replay`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, op_label, owner, tensor_inputs
from qtrace.ops import OpCall, kind_of, read

__all__ = [
    "EXTREMES",
    "SORTS",
    "cut_of",
    "find_selecting",
    "mask_of",
    "opaque_selection",
    "reaching",
    "read_places",
    "read_ranking",
    "selects",
    "selects_untold",
]

SORTS = ("topk", "sort", "argsort")
"""The ops that give scores in their order."""
EXTREMES = ("argmax", "argmin")
"""The ops that give the place of one score."""
_RANKING = frozenset((*SORTS, *EXTREMES))
# The last part of the label of each op that selects rows by the values of its inputs.
_SELECTING = {"cond_take", "nms", "non_zero", "CondTake", "NMSKeep", "NonZero"}


def read_ranking(expr: Expr) -> OpCall | None:
    """Reads ``expr`` if it gives places of scores by their order; None if it does not."""
    if kind_of(expr) not in _RANKING:  # every expr of every run is asked
        return None
    call = read(expr)
    if call is None:
        return None
    axis = call.attrs.get("axis")
    several = axis is not None and len(axis) != 1
    return None if several or call.attrs.get("kth_only") else call


def read_places(expr: Expr) -> OpCall | None:
    """Reads ``expr`` if it ranks scores and something reads their places; None if not.

    Only the values of a top-k, such as a threshold or a mean of the best, move by no more than a score does,
    whatever the order is. They are no selection, and the places of another run would give other values.
    """
    call = read_ranking(expr)
    if call is None or call.kind in EXTREMES:
        return call
    places = expr.outputs[-1]
    return call if places.users or places in expr.top_graph._outputs else None


def selects(expr: Expr) -> bool:
    """Whether `expr` selects rows by values: by a known op, a boolean index, or inside of an opaque node."""
    label = op_label(expr).rpartition(".")[2]
    if label in _SELECTING or opaque_selection(expr) is not None:
        return True
    return "getitem" in label and mask_of(expr) is not None


def opaque_selection(expr: Expr) -> OpaqueOp | None:
    """Returns the opaque node of ``expr`` if it selects; None if not."""
    op = owner(expr)
    return op if isinstance(op, OpaqueOp) and op.selecting is not None else None


def selects_untold(expr: Expr) -> bool:
    """Whether ``expr`` is an opaque node that selects in the body of a loop, which no run replays."""
    op = owner(expr)
    return isinstance(op, OpaqueOp) and op.selects_inside


def mask_of(expr: Expr) -> int | None:
    """Returns which input of ``expr`` is the mask by which it picks rows; None without one."""
    label = op_label(expr).rpartition(".")[2]
    first = 1 if "getitem" in label else 0
    masks = [
        i
        for i, n in enumerate(expr.inputs)
        if i >= first and isinstance(n, TensorNode) and n.dtype == np.bool_
    ]
    return masks[0] if masks and ("getitem" in label or label in _SELECTING) else None


def find_selecting(model: TracedModule) -> tuple[Expr, ...]:
    """Returns the exprs of a flat graph that select by values of its inputs, in execution order."""
    return tuple(expr for expr in exprs(model) if selects(expr) or read_places(expr) is not None)


def reaching(model: TracedModule, ends: Sequence[Node] | None = None) -> tuple[frozenset[int], ...]:
    """Finds the selections before each output, by their places in `find_selecting`.

    Args:
        model: a flat graph.
        ends: the nodes that take the place of the outputs; None for the outputs.
    """
    numbers = {expr: number for number, expr in enumerate(find_selecting(model))}
    before: dict[Node, frozenset[int]] = {}
    for expr in exprs(model):
        union = frozenset().union(*(before.get(node, frozenset()) for node in tensor_inputs(expr)))
        if expr in numbers:
            union |= {numbers[expr]}
        before.update(dict.fromkeys(expr.outputs, union))
    return tuple(before.get(node, frozenset()) for node in (ends or model.graph.outputs))


def cut_of(expr: Expr) -> int | None:
    """Returns how many of the places of a full sort are read, by a slice after it; None for all."""
    places = expr.outputs[-1]
    shape = places.shape
    users = [read(user) for user in places.users]
    sizes = [
        int(user.out.shape[-1])
        for user in users
        if user is not None and user.kind == "getitem" and user.out.shape is not None and len(user.out.shape)
    ]
    if shape is None or not users or len(sizes) != len(users):
        return None
    return max(sizes) if 0 < max(sizes) < int(shape[-1]) else None
