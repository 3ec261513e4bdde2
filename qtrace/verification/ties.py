"""Equal scores: what sorts or searches them may give any of their orders, and no side is wrong.

MegEngine's top-k and argsort give equal scores in an order of their own, runtimes mostly give the first one
first, as ONNX demands. verify lets the graph do so, too. Scores that are equal but for the last bits of float
arithmetic can still come in another order. What is computed from their positions is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.graph.interpreter import Interpreter, interpret
from qtrace.graph.source_lines import name_with_line
from qtrace.graph.types import Expr, Node, TracedModule
from qtrace.graph.walk import called_graph, exprs, op_label
from qtrace.ops import OpCall
from qtrace.outputs.replay import SelectionTape, score_rows
from qtrace.outputs.selections import EXTREMES, read_ranking

__all__ = ["FirstOfEquals", "Ranked", "find_rankings"]

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


class FirstOfEquals(Interpreter):
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
        super().__init__(traced)
        self.tape = SelectionTape(places)
        self.first_of_equals = first_of_equals
        self.tied: dict[Node, Ranked | None] = {}

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes the outputs of ``expr``, also of a module that is one call of the graph."""
        graph = called_graph(expr)
        if graph is not None:
            values = self._execute(graph, list(inputs), None)
            return [values[node] for node in graph._outputs]
        results = None if self.tape.replays_whole(expr) else interpret(expr, inputs)
        return self.follow(expr, inputs, results)

    def follow(
        self, expr: Expr, inputs: Sequence[Any], results: Sequence[Any] | None
    ) -> Sequence[Any] | None:
        """Returns the results of ``expr`` with the first of equal scores first, and as the tape selects."""
        call = read_ranking(expr)
        if call is not None and results is not None:
            results = self._rank(call, inputs, results)
        return self.tape.follow(expr, inputs, results)

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
    rankings: dict[Node, str] = {}
    for expr in exprs(model):
        if read_ranking(expr) is not None:
            rankings[expr.outputs[-1]] = name_with_line(expr, op_label(expr))
        origins = [rankings[node] for node in expr.inputs if node in rankings]
        if origins:
            rankings.update((node, origins[0]) for node in expr.outputs)
    return rankings


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
