"""What a runtime has picked for its outputs, as the tape of a run of the graph keeps it.

The rows of a file's outputs are those that the file itself picks. Another run of it, such as one whose
integers are outputs, too, may compute a score a little otherwise and pick other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qtrace.graph.types import Expr, TracedModule
from qtrace.graph.walk import exprs
from qtrace.ops import kind_of
from qtrace.outputs.selections import find_selecting, mask_of, opaque_selection, read_places, selects

__all__ = ["read_runtime_places"]

_RANKINGS = {"topk": "TopK", "sort": "TopK", "argsort": "TopK", "argmax": "ArgMax", "argmin": "ArgMin"}


def read_runtime_places(
    model: TracedModule, kinds: Sequence[str], told: Sequence[np.ndarray], own: Sequence[np.ndarray]
) -> Sequence[np.ndarray]:
    """Returns the places of each selection of a graph, as a runtime has picked them.

    Args:
        model: the flat graph that the file was written from.
        kinds: the ops of the nodes of the file that select, in order.
        told: what each of these nodes has picked.
        own: the places of a run of the graph, whose shapes are taken, and which are returned if the nodes of
            the file are not those of the graph.
    """
    if not kinds:
        return own
    written = [(expr, _written_as(expr)) for expr in exprs(model)]
    expected = [kind for _, ops in written for kind in ops]
    selecting = find_selecting(model)
    if expected != list(kinds) or len(told) != len(kinds) or len(own) != len(selecting):
        return own
    places, values, kept = list[np.ndarray](), iter(told), iter(own)
    for expr, ops in written:
        picked = [next(values) for _ in ops]
        if expr in selecting:
            as_kept = _as_on_tape(expr, picked, next(kept))
            if as_kept is None:
                return own
            places.append(as_kept)
    return places


def _written_as(expr: Expr) -> Sequence[str]:
    """Returns the ops of the ONNX nodes that ``expr`` becomes and that select."""
    op = opaque_selection(expr)
    if op is not None and op.selecting is not None:
        return op.selecting.kinds
    kind = kind_of(expr)
    if kind in _RANKINGS:  # also where the graph reads no places: the file converts them all the same
        return [_RANKINGS[kind]]
    if not selects(expr):
        return []
    if mask_of(expr) is None:
        return ["NonMaxSuppression"]
    return ["Compress", "NonZero"] if len(expr.outputs) > 1 else ["Compress"]


def _as_on_tape(expr: Expr, told: Sequence[np.ndarray], own: np.ndarray) -> np.ndarray | None:
    """Returns what nodes have picked as the tape keeps it; None for places of another shape."""
    op = opaque_selection(expr)
    if op is not None and op.selecting is not None:
        return op.selecting.table(told)
    picked = told[0]
    if read_places(expr) is None and mask_of(expr) is None:
        return picked[:, 2].astype(own.dtype)  # the boxes of one image and class
    return picked.reshape(own.shape).astype(own.dtype) if picked.size == own.size else None
