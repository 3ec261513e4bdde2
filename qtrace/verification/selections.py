"""Finds tensors whose number of rows depends on values: results of NMS or a mask, and what they lead to.

If one LSB moves a value over a threshold, graph and runtime keep different numbers of rows. Their values then
cannot be compared, and the file need not be wrong. The rows of a file's outputs are those that the file
itself picks: another run of it, whose integers are outputs, too, may pick other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from qtrace.graph.source_lines import name_with_line
from qtrace.graph.types import Expr, Node, TracedModule
from qtrace.graph.walk import exprs, op_label
from qtrace.ops import kind_of
from qtrace.outputs.selections import find_selecting, mask_of, opaque_selection, read_places, selects

__all__ = ["Shape", "Unsettled", "describe_rows", "find_selections", "read_runtime_places"]

Shape = tuple[int, ...]
_RANKINGS = {"topk": "TopK", "sort": "TopK", "argsort": "TopK", "argmax": "ArgMax", "argmin": "ArgMin"}


def find_selections(model: TracedModule) -> dict[Node, str]:
    """Finds the tensors whose number of rows depends on values.

    Returns:
        Node -> the first op before the node that selects rows, in words, with its source line if known.
    """
    selections: dict[Node, str] = {}
    for expr in exprs(model):
        origins = [selections[node] for node in expr.inputs if node in selections]
        if origins or selects(expr):
            origin = origins[0] if origins else name_with_line(expr, op_label(expr))
            selections.update((node, origin) for node in expr.outputs)
    return selections


class Unsettled:
    """Follows values that both sides may decide otherwise from the same integers, in graph order.

    Attributes:
        unequal: the nodes that both sides have decided otherwise, and the nodes that are computed from them.
    """

    def __init__(self) -> None:
        self._open: set[Node] = set()  # up to the next site
        self.unequal: set[Node] = set()

    def follow(self, node: Node, starts: bool, site: bool) -> bool:
        """Returns whether a node may differ.

        Args:
            node: the node, later in the graph than those before.
            starts: whether its own op decides.
            site: whether the runtime's integers are taken there: what follows is equal, if they are.
        """
        if not (starts or self._open or self.unequal):
            return False
        inputs = set(node.expr.inputs)
        unequal = not inputs.isdisjoint(self.unequal)
        unsettled = starts or not inputs.isdisjoint(self._open)
        if unequal:
            self.unequal.add(node)
        if unsettled and (unequal or not site):
            self._open.add(node)
        return unsettled

    def differ(self, *nodes: Node) -> None:
        """Records that both sides have decided otherwise, and ``nodes`` with what was decided."""
        self.unequal |= self._open | set(nodes)

    def among(self, outputs: Iterable[tuple[str, Node]]) -> set[str]:
        """Returns the names of those outputs that may differ."""
        return {name for name, node in outputs if node in self._open or node in self.unequal}


def describe_rows(tensor: str, shapes: Sequence[tuple[Shape, Shape]]) -> str:
    """Says that graph and runtime have different rows of a tensor.

    Args:
        tensor: "site" or "output" and its name.
        shapes: the tensor's shape in the graph and in the runtime, for each batch in which its rows differ.
    """
    graph, runtime = next(((a, b) for a, b in shapes if a != b), shapes[0])
    batches = f"in {len(shapes)} batch{'' if len(shapes) == 1 else 'es'}"
    if graph == runtime:
        return (
            f"{tensor} has other rows in the runtime than in the graph, or another order of them, {batches}"
        )
    return f"{tensor} has shape {runtime} in the runtime and {graph} in the graph {batches}"


def read_runtime_places(
    model: TracedModule, kinds: Sequence[str], told: Sequence[np.ndarray], own: Sequence[np.ndarray]
) -> Sequence[np.ndarray]:
    """Returns the places of each selection of a graph, as a runtime has picked them.

    Args:
        model: the flat graph that the file was written from.
        kinds: the ops of the nodes of the file that select, in order.
        told: what each of these nodes has picked.
        own: the places of a run of the graph, whose shapes are taken, and which are returned if the nodes of
            the file differ from the graph's.
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
