"""Rows and orders that may differ: of NMS, a mask, or equal scores that are ranked, and what they lead to.

If one LSB moves a value over a threshold, graph and runtime keep different numbers of rows. Their values then
cannot be compared, and the file need not be wrong. The rows of a file's outputs are those that the file
itself picks: another run of it, whose integers are outputs, too, may pick other rows.

Equal scores: what sorts or searches them may give any of their orders, and no side is wrong.

MegEngine's top-k and argsort give equal scores in an order of their own, runtimes mostly give the first one
first, as ONNX demands. verify lets the graph do so, too. Scores that are equal but for the last bits of float
arithmetic can still come in another order. What is computed from their positions is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.comparing.selections import (
    EXTREMES,
    TapedRun,
    find_selecting,
    mask_of,
    opaque_selection,
    read_places,
    read_ranking,
    score_rows,
    selects,
)
from qtrace.graph.notes import name_with_line
from qtrace.graph.types import Expr, Node, TracedModule
from qtrace.graph.walk import exprs, op_label
from qtrace.ops import OpCall, kind_of

Shape = tuple[int, ...]
_RANKINGS = {"topk": "TopK", "sort": "TopK", "argsort": "TopK", "argmax": "ArgMax", "argmin": "ArgMin"}


def find_selections(model: TracedModule) -> dict[Node, str]:
    """Finds the tensors whose number of rows depends on values.

    Returns:
        Node -> the first op before the node that selects rows, in words, with its source line if known.
    """
    return _follow(model, lambda expr: expr.outputs if selects(expr) else ())


def _follow(model: TracedModule, decided: Callable[[Expr], Sequence[Node]]) -> dict[Node, str]:
    """Maps what an expr decides, and what is computed from that, to the first expr that does, in words."""
    found: dict[Node, str] = {}
    for expr in exprs(model):
        origins = [found[node] for node in expr.inputs if node in found]
        if nodes := expr.outputs if origins else decided(expr):
            origin = origins[0] if origins else name_with_line(expr, op_label(expr))
            found.update(dict.fromkeys(nodes, origin))
    return found


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


# Two engines compute the same score with differences of float arithmetic, as a share of the largest score.
_EQUAL_SHARE = 1e-5


@dataclass(frozen=True)
class Ranked:
    """Scores, and the scores that a sort or search picks.

    Attributes:
        rows: the scores; those on the last axis are ranked against each other.
        picked: the scores at the picked positions, in order.
    """

    rows: np.ndarray
    picked: np.ndarray

    def accepts(self, positions: np.ndarray) -> bool:
        """Whether ``positions`` differ from the right ones only in the order of equal scores."""
        if positions.size != self.picked.size:
            return False
        places = positions.reshape(self.picked.shape).astype(np.int64)
        if places.min() < 0 or places.max() >= self.rows.shape[-1]:
            return False
        if (np.diff(np.sort(places, axis=-1), axis=-1) == 0).any():
            return False
        return bool(_near(np.take_along_axis(self.rows, places, -1), self.picked).all())


class FirstOfEquals(TapedRun):
    """Runs a traced module; of equal scores, sorts and searches give the first one first.

    Args:
        traced: the traced module.
        first_of_equals: whether they do; False for the order of MegEngine's kernels.
        places: the places of another run to replay in the place of its own; None for its own.

    Attributes:
        tape: the selections of the run.
        tied: the nodes that show the order of equal scores; nodes of positions with what they rank.
    """

    def __init__(
        self,
        traced: TracedModule,
        first_of_equals: bool = True,
        places: Sequence[np.ndarray] | None = None,
    ) -> None:
        super().__init__(traced, places)
        self.first_of_equals = first_of_equals
        self.tied: dict[Node, Ranked | None] = {}

    def follow(
        self, expr: Expr, inputs: Sequence[Any], results: Sequence[Any] | None
    ) -> Sequence[Any] | None:
        """Returns the results of ``expr`` with the first of equal scores first, and as the tape selects."""
        call = read_ranking(expr)
        if call is not None and results is not None:
            results = self._rank(call, inputs, results)
        return super().follow(expr, inputs, results)

    def _rank(self, call: OpCall, inputs: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        values = dict(zip(call.expr.inputs, inputs, strict=True))
        rows, positions = score_rows(call, values), results[-1]
        if not rows.size or np.isnan(rows).any():
            return results
        falling = call.kind == "argmax" or bool(call.attrs.get("descending"))
        order = _stable_order(rows, falling)
        ordered = np.take_along_axis(rows, order, -1)
        count = 1 if call.kind in EXTREMES else int(positions.shape[-1])
        if call.attrs.get("no_sort"):
            self.tied.update(dict.fromkeys(call.expr.outputs))
        elif _has_ties(ordered[..., : count + 1]):
            self.tied[call.expr.outputs[-1]] = Ranked(rows, ordered[..., :count])
        if not self.first_of_equals:
            return results
        ranked = type(positions)(order[..., :count].reshape(positions.shape).astype(positions.dtype))
        if len(results) == 1:
            return (ranked,)
        return (type(ranked)(ordered[..., :count].reshape(results[0].shape)), ranked)


def find_rankings(model: TracedModule) -> dict[Node, str]:
    """Finds the tensors that depend on positions of sorted or searched scores.

    Returns:
        Node -> the first op before the node that ranks scores, in words, with its source line if known.
    """
    return _follow(model, lambda expr: expr.outputs[-1:] if read_ranking(expr) is not None else ())


def _stable_order(rows: np.ndarray, falling: bool) -> np.ndarray:
    """Returns the positions in the order of their scores; of equal scores, the first comes first."""
    if not falling:
        return np.argsort(rows, axis=-1, kind="stable")
    turned: np.ndarray = np.argsort(rows[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    return rows.shape[-1] - 1 - turned


def _has_ties(ordered: np.ndarray) -> bool:
    """Whether neighbours in sorted rows are equal but for float arithmetic."""
    return bool(_near(ordered[..., :-1], ordered[..., 1:]).any())


def _near(scores: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns which scores are equal but for float arithmetic, whose error follows the row's largest."""
    a, b = scores.astype(np.float64), others.astype(np.float64)
    size = np.abs(np.where(np.isfinite(a), a, 0.0)).max(initial=0.0, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # infinities that are equal
        return (a == b) | (np.abs(a - b) <= _EQUAL_SHARE * size)
