"""Finds where a graph selects: ops that rank scores, suppress boxes, or pick rows by a mask, by structure.

A *selection* turns values into places: a top-k, a sort, an arg-max, a suppression, a boolean index.
A small error of a score may exchange two places, and then all rows after them are others, although each row
may be right. So a selection is judged by its places, and the rows after it by rows.

The quantized graph runs, and a tape keeps its selections: the places that each top-k, sort, arg-max,
suppression or mask gives. Then the float graph runs with these places, not its own. What it gives has the
rows of the quantized graph in their order, also after a second selection or a decoder whose queries see each
<<<<<<< HEAD:qtrace/comparing/selections.py
other. So both are compared place by place. Whether the selection was right is judged apart, at each selection
and by the float scores. A place is right if float selects it, too, in whatever order. So is one with a score
at most a step of 8 bits below the last one that float selects. What is missed counts as well: a place whose
=======
other, so both are compared place by place. Whether the selection was right is judged apart, at each selection
and by the float scores. A place is right if float selects it, too, in whatever order, or if its score is no
more than a step of 8 bits below the last one that float selects. What is missed counts as well. A place whose
>>>>>>> words:qtrace/outputs/replay.py
score is more than a step above the last one that float selects is *clear*, and each clear place that is not
selected makes one place wrong. Clear places are also counted by themselves, and the worse share is told, so
that hundreds of places of background do not hide that all objects are lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from qtrace.comparing.sums import decibels
from qtrace.graph.interpreter import Interpreter, interpret
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import called_graph, exprs, op_label, owner, tensor_inputs
from qtrace.onnxfile.selecting import RankedPlaces, split_places
from qtrace.ops import OpCall, kind_of, read

SORTS = ("topk", "sort", "argsort")
"""The ops that give scores in their order."""
EXTREMES = ("argmax", "argmin")
"""The ops that give the place of one score."""
_RANKING = frozenset((*SORTS, *EXTREMES))
# The last part of the label of each op that selects rows by the values of its inputs.
_SELECTING = {"cond_take", "nms", "non_zero", "CondTake", "NMSKeep", "NonZero"}
LEAST_SHARE = 0.5
"""Below this share of right rows a selection is another one, and the graph is broken."""
# The steps of a grid of 8 bits over the scores: nearer ones may change their places.
_STEPS = 255
# Scores as far below 0 stand for minus infinity: those that an attention or a suppression masks.
_FAR = -1e3


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

    The values of a top-k, such as a threshold or a mean of the best, move by no more than a score does in any
    order. So they are no selection by themselves: the places of another run would give other values.
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


def _cut_of(expr: Expr) -> int | None:
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


@dataclass(frozen=True)
class Share:
    """How many places of one selection are float's.

    Attributes:
        right: the number of right places.
        places: the number of places.
        wrong: which of the places are wrong, in the shape of the selection's result; None if none is, or if
            that is not known.
        found: how many of the clear places of float are among the places.
        clear: the number of places that float selects clearly: by a score more than a step above its last.
    """

    right: int
    places: int
    wrong: np.ndarray | None = None
    found: int = 0
    clear: int = 0


class SelectionTape:
    """Keeps the places of each selection of one run, or replays another run's.

    Selections are known by their order of execution, which is the same in float and in the quantized graph.

    Args:
        given: the places to replay, as another tape has kept them; None to select by the values of this run.

    Attributes:
        places: for each selection, its places: positions, or a mask.
        shares: for each selection, how many of the replayed places are right by this run's scores.
    """

    def __init__(self, given: Sequence[np.ndarray] | None = None) -> None:
        self.given = given
        self.places: list[np.ndarray] = []
        self.shares: list[Share] = []

    def replays_whole(self, expr: Expr) -> bool:
        """Returns whether `follow` computes ``expr`` by itself, which cannot be run by its own selections.

        An opaque node selects and goes on with what it selected. Of its inputs the ones after other
        selections have as many rows as the other run has picked, and its own places may be more or fewer.
        """
        if self._next_given() is None:
            return False
        op = opaque_selection(expr)
        return op is not None and self._given_to(op) is not None

    def run(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes ``expr``: with the replayed places if it selects."""
        return self.follow(expr, inputs, None if self.replays_whole(expr) else interpret(expr, inputs))

    def follow(
        self, expr: Expr, inputs: Sequence[Any], results: Sequence[Any] | None
    ) -> Sequence[Any] | None:
        """Returns the results of ``expr``: with the replayed places if it selects.

        Args:
            expr: the expr.
            inputs: its inputs.
            results: what it gives by its own selections; they are not read where `replays_whole`.
        """
        op = opaque_selection(expr)
        if op is not None:
            given = self._given_to(op)
            if given is None:
                self._note_unjudged()
                self.places.append(op.places(*inputs[1:]))
                return results
            outputs, replayed = op.replay(given, *inputs[1:])
            self.shares.append(_share_of_worst(replayed.own, given, replayed.rankings))
            self.places.append(given)
            return outputs
        call = read_places(expr)
        if results is None or (call is None and not selects(expr)):
            return results
        if call is not None:
            own = results[-1].numpy()
            given = self._given(own, same_shape=True)
            if given is not None:
                rows = score_rows(call, dict(zip(expr.inputs, inputs, strict=True)))
                results = self._rank(call, rows, own, given, results)
        else:
            place = mask_of(expr)
            own = (results[-1] if place is None else inputs[place]).numpy()
            given = self._given(own, same_shape=place is not None)
            if given is not None:
                self.shares.append(_share_of_rows(own, given))
                results = _pick(expr, inputs, results, place, given)
        if given is None:
            self._note_unjudged()
        self.places.append(own if given is None else given)
        return results

    def _next_given(self) -> np.ndarray | None:
        """Returns the given places of the next selection; None without any."""
        number = len(self.places)
        return None if self.given is None or number >= len(self.given) else self.given[number]

    def _given_to(self, op: OpaqueOp) -> np.ndarray | None:
        """Returns the given places of ``op``, the next selection; None without any that it can take."""
        given, fragment = self._next_given(), op.selecting
        return given if given is not None and fragment is not None and fragment.takes(given) else None

    def _given(self, own: np.ndarray, same_shape: bool) -> np.ndarray | None:
        given = self._next_given()
        if given is None or given.ndim != own.ndim:
            return None
        return given if given.shape == own.shape or not same_shape else None

    def _note_unjudged(self) -> None:
        """Notes in a replay that a selection is not judged; the others keep their numbers."""
        if self.given is not None:
            self.shares.append(Share(0, 0))

    def _rank(
        self, call: OpCall, rows: np.ndarray, own: np.ndarray, given: np.ndarray, results: Sequence[Any]
    ) -> Sequence[Any]:
        """Replaces the places of a ranking by the given ones, and its scores by those at these places."""
        tensor = type(results[-1])
        columns = (*rows.shape[:-1], -1)
        picked, chosen = own.reshape(columns).astype(np.int64), given.reshape(columns).astype(np.int64)
        falling = call.kind == "argmax" or bool(call.attrs.get("descending"))
        scores = rows if falling else -rows
        share = _share_of_places(scores, picked, chosen, _cut_of(call.expr))
        wrong = None if share.wrong is None else share.wrong.reshape(given.shape)
        self.shares.append(replace(share, wrong=wrong))
        replayed = tensor(given.astype(own.dtype))
        if len(results) == 1:
            return (replayed,)
        return (tensor(np.take_along_axis(rows, chosen, -1).reshape(results[0].shape)), replayed)


def score_rows(call: OpCall, values: Any) -> np.ndarray:
    """Returns the scores with those that are ranked against each other on the last axis."""
    node = call.inputs[0] if call.inputs else call.expr.inputs[0]
    scores: np.ndarray = values[node].numpy()
    if call.kind in SORTS:
        return scores
    axis = call.attrs["axis"]
    return scores.reshape(-1) if axis is None else np.moveaxis(scores, int(axis[0]), -1)


def _pick(
    expr: Expr, inputs: Sequence[Any], results: Sequence[Any], place: int | None, given: np.ndarray
) -> Sequence[Any]:
    """Returns the results of a selection of rows with the given mask, or the given positions themselves."""
    tensor = type(results[-1])
    if place is None:
        return (*results[:-1], tensor(given))
    changed = [tensor(given) if i == place else value for i, value in enumerate(inputs)]
    picked = interpret(expr, changed)
    assert picked is not None
    return picked


def _share_of_places(rows: np.ndarray, own: np.ndarray, given: np.ndarray, cut: int | None) -> Share:
    """Judges the places of a ranking by float's scores, both those that are picked and those that are missed.

    A step is 1/255 of the largest range of the batch's scores, which share a scale: a picture without objects
    has a small range of its own. *Last* is the score of the last place that float picks.

    - A given place is wrong if its score is more than a step below the last.
    - A place of float's is clear if its score is more than a step above the last. A clear place that is not
      among the given ones is missed, and no other place stands in for it: all are more than a step below.
    - The places that are not right are the wrong ones or the missed ones, whichever are more: a wrong place
      and a missed place are two sides of one exchange.

    Args:
        rows: the scores, those that are ranked against each other on the last axis, more is better.
        own: the places that float picks, the best first.
        given: the places that are judged.
        cut: how many of the places are read; None for all.
    """
    if not rows.size or not given.size:
        return Share(0, 0)
    scores = rows.astype(np.float64)
    kept = scores > _FAR if (scores > _FAR).any() else np.isfinite(scores)
    top = np.where(kept, scores, -np.inf).max(axis=-1, keepdims=True)
    low = np.where(kept, scores, np.inf).min(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        ranges = np.nan_to_num(top - low, nan=0.0, posinf=0.0, neginf=0.0)
    step = ranges.max() / _STEPS
    own, read = own[..., :cut], given[..., :cut]
    exact = np.take_along_axis(scores, own, -1)
    last = exact.min(axis=-1, keepdims=True)
    wrong = np.take_along_axis(scores, given, -1) < last - step
    clear = exact > last + step
    picked = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(picked, read, True, -1)
    missed = clear & ~np.take_along_axis(picked, own, -1)
    lost = np.maximum(wrong[..., :cut].sum(axis=-1), missed.sum(axis=-1)).sum()
    found, total = int((clear & ~missed).sum()), int(clear.sum())
    return Share(read.size - int(lost), read.size, wrong if wrong.any() else None, found, total)


def _share_of_rows(own: np.ndarray, given: np.ndarray) -> Share:
    """Counts the rows that both masks, or both lists of positions, pick, among those that either picks."""
    if own.dtype == np.bool_:
        return Share(int((own & given).sum()), int((own | given).sum()))
    rows = [np.reshape(places, (len(places), math.prod(places.shape[1:]))) for places in (own, given)]
    if np.array_equal(own, given):
        count = len(np.unique(_row_keys(rows[0].astype(np.int64))))
        return Share(count, count)
    keys = _row_keys(np.concatenate(rows).astype(np.int64))
    mine, others = np.unique(keys[: len(own)]), np.unique(keys[len(own) :])
    both = len(np.intersect1d(mine, others, assume_unique=True))
    return Share(both, len(mine) + len(others) - both)


def _row_keys(rows: np.ndarray) -> np.ndarray:
    """Numbers the rows of integers, equal rows alike: faster by far than a set of tuples."""
    if not rows.size:
        return np.zeros(len(rows), np.int64)
    low = rows.min(axis=0)
    sizes = [int(size) for size in rows.max(axis=0) - low + 1]
    if math.prod(sizes) >= 2**62:
        return np.unique(rows, axis=0, return_inverse=True)[1]
    strides = np.array([math.prod(sizes[place + 1 :]) for place in range(len(sizes))], np.int64)
    keys: np.ndarray = (rows - low) @ strides
    return keys


def _share_of_worst(own: np.ndarray, given: np.ndarray, rankings: Mapping[int, RankedPlaces]) -> Share:
    """Judges the selection of a fragment that has the smallest share of right places.

    After a suppression others rank what it has kept: their places agree, whatever that is.

    Args:
        own: the places that float picks after the given ones, one a row, the number of the selection first;
            below 0 for a row that is no place.
        given: the places that are judged.
        rankings: number of a selection that ranks -> its scores, and both places.
    """
    shares, mine, others = [], split_places(own), split_places(given)
    for number in sorted(number for number in {*mine, *others} if number >= 0):
        if number in rankings:
            shares.append(replace(_share_of_places(*rankings[number], None), wrong=None))
        else:
            shares.append(_share_of_rows(mine[number], others[number]))
    return min(shares, key=lambda share: share.right / max(share.places, 1), default=Share(0, 0))


class TapedRun(Interpreter):
    """Runs a traced module, and keeps or replays its selections.

    Args:
        traced: the traced module.
        given: the places to replay; None to select by the values of this run.

    Attributes:
        tape: the selections of the last run.
    """

    def __init__(self, traced: TracedModule, given: Sequence[np.ndarray] | None = None) -> None:
        super().__init__(traced, waits=True)
        self.tape = SelectionTape(given)

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes the outputs of ``expr``, also of a module that is one call of the graph."""
        graph = called_graph(expr)
        if graph is not None:
            return self.run_all(graph, list(inputs))
        return self.follow(expr, inputs, None if self.tape.replays_whole(expr) else interpret(expr, inputs))

    def follow(
        self, expr: Expr, inputs: Sequence[Any], results: Sequence[Any] | None
    ) -> Sequence[Any] | None:
        """Returns the results of ``expr`` as the tape selects; see `SelectionTape.follow`."""
        return self.tape.follow(expr, inputs, results)


@dataclass
class SelectedShares:
    """The share of right rows after the selections before each output, added up over batches.

    Attributes:
        reaching: for each output the selections before it.
        names: for each selection the op that selects.
        right, places: for each selection the number of right places and of all.
        found, clear: for each selection the number of float's clear places that are selected, and of all.
    """

    reaching: tuple[frozenset[int], ...]
    names: tuple[str, ...]
    right: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    clear: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, model: TracedModule, ends: Sequence[Node] | None = None) -> SelectedShares:
        """Builds empty sums for the selections of a flat graph, and its outputs or the nodes ``ends``."""
        names = tuple(f"{op_label(e)} {e.outputs[-1].name}" for e in find_selecting(model))
        return cls(reaching(model, ends), names).empty()

    def empty(self) -> SelectedShares:
        """Returns sums of the same selections with nothing added."""
        return SelectedShares(self.reaching, self.names, *([0] * len(self.names) for _ in range(4)))

    def __bool__(self) -> bool:
        """Whether an output depends on a selection."""
        return any(self.reaching)

    def add(self, shares: Iterable[Share]) -> None:
        """Adds the shares of one batch, in the order of the selections."""
        for number, share in zip(range(len(self.names)), shares, strict=False):
            self.right[number] += share.right
            self.places[number] += share.places
            self.found[number] += share.found
            self.clear[number] += share.clear

    def blank(self, outputs: Sequence[np.ndarray], shares: Sequence[Share]) -> list[np.ndarray]:
        """Returns the outputs of one batch, the floats with 0 in the rows that float does not select.

        They are no rows of float's: they count by their share, and not as noise of the others.

        Args:
            outputs: the outputs on either side; None for one that is not known.
            shares: the shares of the batch, in the order of the selections.
        """
        return [self._blank(index, value, shares) for index, value in enumerate(outputs)]

    def _blank(self, index: int, value: np.ndarray, shares: Sequence[Share]) -> np.ndarray:
        if value is None or value.dtype.kind != "f":
            return value
        for number in sorted(self.reaching[index]):
            wrong = shares[number].wrong if number < len(shares) else None
            rows = None if wrong is None else _along(wrong, value)
            if rows is not None:
                value = np.where(rows, 0.0, value).astype(value.dtype)
        return value

    def output(self, index: int) -> float | None:
        """Returns the share of rows of an output that float selects, too; None if nothing selects them.

        It is the smaller share of all places and of float's clear places, at the worst selection.
        """
        counts = (pair for number in self.reaching[index] for pair in self.counts(number))
        return min((right / places for right, places in counts if places), default=None)

    def counts(self, number: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns how many places of a selection are float's, of how many; of all, and of the clear ones."""
        return (self.right[number], self.places[number]), (self.found[number], self.clear[number])

    def worst(self) -> float | None:
        """Returns the smallest share of all outputs; None if no output is selected."""
        shares = [share for index in range(len(self.reaching)) if (share := self.output(index)) is not None]
        return min(shares, default=None)

    def lost(self, index: int) -> float:
        """Returns the share of rows of an output that float does not select."""
        share = self.output(index)
        return 0.0 if share is None else 1.0 - share

    def lost_db(self) -> float:
        """Returns the share of lost rows of the worst output as noise, in dB; infinity without any.

        Rows that are not float's are noise as large as their signal, whatever the noise of the others is.
        """
        return decibels(1.0, max(map(self.lost, range(len(self.reaching))), default=0.0))


def _along(rows: np.ndarray, value: np.ndarray) -> np.ndarray | None:
    """Returns ``rows`` in a shape that broadcasts over ``value``; None if it lacks an axis of them."""
    if rows.shape == value.shape[: rows.ndim]:
        return rows.reshape(*rows.shape, *[1] * (value.ndim - rows.ndim))
    lead, count = rows.shape[:-1], rows.shape[-1] if rows.ndim else 1
    for axis in range(value.ndim):
        if value.shape[axis] == count and math.prod(value.shape[:axis]) == math.prod(lead):
            return rows.reshape(*value.shape[: axis + 1], *[1] * (value.ndim - axis - 1))
        if value.shape[: len(lead)] == lead and axis >= len(lead) and value.shape[axis] == count:
            return rows.reshape(*lead, *[1] * (axis - len(lead)), count, *[1] * (value.ndim - axis - 1))
    return None


def differ(places: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    """Returns whether two runs have selected otherwise."""
    return len(places) != len(others) or not all(map(np.array_equal, places, others))
