"""Fragments that select: which places their nodes pick, and the fragment with the places of another run.

An opaque node often goes from a suppression to the boxes that it keeps, as their number depends on values.
Its outputs by themselves do not tell which boxes they are.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from qtrace.onnxfile.external_data import onnx
from qtrace.onnxfile.fragment import Fragment
from qtrace.onnxfile.model import bodies_of, own_operators, read_names

# Ops whose last output has the places, and ops whose last input is a mask.
_PLACES = ("NonMaxSuppression", "NonZero", "TopK", "ArgMax", "ArgMin")
_MASKED = ("Compress", "If")
_LISTS = ("NonMaxSuppression", "NonZero", *_MASKED)
_OWN = ("", "ai.onnx")
# The places of a list in a branch of an If that was not taken.
_NOWHERE = {"NonMaxSuppression": (0, 3), "NonZero": (1, 0)}


@dataclass(frozen=True)
class _Selection:
    """A node that selects.

    Attributes:
        kind: its op; an If selects the branch, where one of its branches selects.
        name: the tensor of its places.
        axis: the axis along which it ranks; 0 for one that lists places.
        scores: the tensor that it ranks; "" for one that lists places.
        falling: whether the largest score is the best.
    """

    kind: str
    name: str
    axis: int = 0
    scores: str = ""
    falling: bool = True

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Returns one row for each place: of a list its numbers, else its index in ``places`` and itself."""
        if self.kind == "NonZero":
            return places.T
        if self.kind == "NonMaxSuppression":
            return places
        if self.kind in _MASKED:
            return np.flatnonzero(places)[:, None]
        indices = np.indices(places.shape).reshape(places.ndim, places.size)
        return np.concatenate([indices, places.reshape(1, -1)]).T

    def columns(self, places: np.ndarray, rank: int) -> np.ndarray:
        """Returns the places of a ranking of ``rank`` axes with the places of one order on the last axis."""
        return np.moveaxis(places, self.axis, -1) if places.ndim == rank else places[..., None]

    def places(self, rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the places of this shape that ``rows`` are made of."""
        if self.kind == "NonZero":
            return np.ascontiguousarray(rows[:, : shape[0]].T)
        if self.kind == "NonMaxSuppression":
            return rows[:, :3]
        whole = np.zeros(shape, np.int64)
        if self.kind in _MASKED:
            whole.reshape(-1)[rows[:, 0]] = 1
        else:
            whole[tuple(rows[:, : len(shape)].T)] = rows[:, len(shape)]
        return whole


def selecting_nodes(model: Any) -> tuple[_Selection, ...]:
    """Returns the nodes of a model that pick places by the order or the size of values, in order.

    Nodes in the branches of an If come after it. Bodies of loops are not looked into: they run many times.
    """
    return tuple(_find(model.graph))


def _find(graph: Any) -> Iterator[_Selection]:
    read = _read_in(graph)
    for node in graph.node:
        selection = _selection_of(node, read)
        if selection is not None:
            yield selection
            if selection.kind == "If":
                for body in bodies_of(node):
                    yield from _find(body)


def _read_in(graph: Any) -> set[str]:
    """Returns the tensors of a graph that its nodes read, or that leave it."""
    return {name for node in graph.node for name in read_names(node)} | {v.name for v in graph.output}


def _selection_of(node: Any, read: set[str]) -> _Selection | None:
    """Returns what a node selects; None if it selects nothing, or if nobody reads its places."""
    if node.domain not in _OWN:
        return None
    if node.op_type in _MASKED:
        if node.op_type == "If" and not any(True for body in bodies_of(node) for _ in _find(body)):
            return None
        return _Selection(node.op_type, node.input[-1])
    name = node.output[-1] if node.op_type in _PLACES else ""
    if not name or name not in read:
        return None
    if node.op_type in _LISTS:
        return _Selection(node.op_type, name)
    attributes = {a.name: a.i for a in node.attribute}
    axis = attributes.get("axis", -1 if node.op_type == "TopK" else 0)
    falling = node.op_type == "ArgMax" or (node.op_type == "TopK" and attributes.get("largest", 1) == 1)
    return _Selection(node.op_type, name, axis, node.input[0], falling)


def selects_inside(model: Any) -> bool:
    """Returns whether the body of a loop or a function selects, where no run tells its places."""
    kinds = {kind for function in model.functions for kind in own_operators(function)}
    return bool(kinds & {*_PLACES, "Compress"}) or _loops_select(model.graph)


def _loops_select(graph: Any) -> bool:
    for node in graph.node:
        for body in bodies_of(node):
            kinds = () if node.op_type == "If" and node.domain in _OWN else own_operators(body)
            if {*kinds} & {*_PLACES, "Compress"} or _loops_select(body):
                return True
    return False


def expose_places(model: Any) -> tuple[list[str], list[str]]:
    """Adds the places that the nodes of a model pick to its outputs, each under a name of its own.

    Args:
        model: the model, which is changed; not if a branch of an If selects, as a run tells but one of them.

    Returns:
        The ops of the nodes that select, and the names of the new outputs, which are as many.
    """
    selections = selecting_nodes(model)
    if any(selection.kind == "If" for selection in selections):
        return [], []
    picked = [_Selected(number, selection, selection.name) for number, selection in enumerate(selections)]
    outputs = _cast(model.graph, picked)
    model.graph.output.extend(_described(name, kind) for name, kind in outputs)
    return [selection.kind for selection in selections], [name for name, _ in outputs]


class RankedPlaces(NamedTuple):
    """What one node ranks, and two selections of it.

    Attributes:
        scores: the scores, those that are ranked against each other on the last axis, more is better.
        own: the places that one run picks, on the last axis.
        given: the places that another run picks.
    """

    scores: np.ndarray
    own: np.ndarray
    given: np.ndarray


class Replayed(NamedTuple):
    """A run of a fragment with the places of another run.

    Attributes:
        outputs: the outputs of the fragment.
        own: the table of the places that this run's values pick, after the given places of all selections
            before.
        rankings: the rankings among the selections, by their numbers; one of which the other run has another
            number of places is left out.
    """

    outputs: list[np.ndarray]
    own: np.ndarray
    rankings: dict[int, RankedPlaces]


class SelectingFragment:
    """Runs a fragment and tells its places, or takes given ones.

    Places are a table with one row for each: the number of the selection, then its numbers, then -1 up to the
    width of the widest. One more row for each selection has -1 minus its number, and the shape of its places.

    Args:
        model: the model of the fragment, which has nodes that select; it is not changed.
    """

    def __init__(self, model: Any) -> None:
        self._selections = selecting_nodes(model)
        self._ranking = [number for number, selection in enumerate(self._selections) if selection.scores]
        self._outputs = len(model.graph.output)
        self._telling = Fragment(_rewritten(model, replays=False))
        self._taking = Fragment(_rewritten(model, replays=True))

    def places(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the table of the places of all selections by the values."""
        return self._table(self._telling.run(values))

    @property
    def kinds(self) -> list[str]:
        """The ops of the nodes that select, in order."""
        return [selection.kind for selection in self._selections]

    def table(self, picked: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the table of places that another runtime tells for each of the selections, in order."""
        return self._table(picked)

    def takes(self, table: np.ndarray) -> bool:
        """Returns whether ``table`` has the places of as many selections as there are."""
        return table.ndim == 2 and sorted(-1 - table[table[:, 0] < 0, 0]) == list(
            range(len(self._selections))
        )

    def replay(self, values: Sequence[np.ndarray], table: np.ndarray) -> Replayed:
        """Computes the outputs for the places of another run, as `places` gives them.

        No node reads a place that the values of this run would pick. The inputs come from the other run's
        places, too, so that they may have another number of rows.
        """
        rows = split_places(table)
        given = [
            selection.places(rows[number], _read_shape(rows[-1 - number]))
            for number, selection in enumerate(self._selections)
        ]
        run = self._taking.run([*values, *given])
        outputs, picked = run[: self._outputs], run[self._outputs :]
        rankings = {}
        for number, scores in zip(self._ranking, picked[len(given) :], strict=True):
            selection, both = self._selections[number], (picked[number], given[number])
            same = both[0].shape == both[1].shape and both[0].size
            if same and both[1].max() < scores.shape[selection.axis]:
                columns = [selection.columns(places, scores.ndim) for places in both]
                ranked = np.moveaxis(scores if selection.falling else -scores, selection.axis, -1)
                rankings[number] = RankedPlaces(ranked, columns[0], columns[1])
        return Replayed(outputs, self._table(picked), rankings)

    def _table(self, picked: Sequence[np.ndarray]) -> np.ndarray:
        pairs = list(zip(self._selections, picked, strict=False))
        rows = [selection.rows(places) for selection, places in pairs]
        width = 1 + max(max(own.shape[1], places.ndim) for own, (_, places) in zip(rows, pairs, strict=True))
        table, end = np.full((sum(map(len, rows)) + len(rows), width), -1, np.int64), 0
        for number, (own, (_, places)) in enumerate(zip(rows, pairs, strict=True)):
            start, end = end, end + len(own)
            table[start:end, 0], table[start:end, 1 : 1 + own.shape[1]] = number, own
            table[end, 0], table[end, 1 : 1 + places.ndim] = -1 - number, places.shape
            end += 1
        return table


def split_places(table: np.ndarray) -> defaultdict[int, np.ndarray]:
    """Splits a table of places by selection, in one pass over it.

    Returns:
        The first number of a row -> the rest of its rows, in their order; none for a number without any.
    """
    starts = np.flatnonzero(np.diff(table[:, 0])) + 1
    runs: dict[int, list[np.ndarray]] = {}
    for first, rows in zip([0, *starts.tolist()], np.split(table[:, 1:], starts), strict=True):
        if len(rows):
            runs.setdefault(int(table[first, 0]), []).append(rows)
    empty = table[:0, 1:]
    parts = {number: rows[0] if len(rows) == 1 else np.concatenate(rows) for number, rows in runs.items()}
    return defaultdict(lambda: empty, parts)


def _read_shape(rows: np.ndarray) -> tuple[int, ...]:
    """Returns the shape of the places of a selection, as its own row of a table has it."""
    (row,) = rows
    return tuple(int(size) for size in row if size >= 0)


def _rewritten(model: Any, replays: bool) -> bytes:
    """Returns a model that gives its places, and after these the scores that it ranks.

    Args:
        model: the model, which is not changed.
        replays: whether it also has its own outputs, before the places, and takes places as further inputs,
            after its own; if not, it computes nothing but what selects.
    """
    changed = type(model).FromString(model.SerializeToString())
    writer = _Writer(replays)
    picked = writer.rewrite(changed.graph)
    if not replays:
        del changed.graph.output[:]
    for name, kind in _cast(
        changed.graph, sorted(picked, key=lambda entry: (bool(entry.scores), entry.number))
    ):
        changed.graph.output.append(_described(name, kind))
    changed.graph.input.extend(_described(name, writer.int64) for name in writer.inputs)
    if not replays:
        _drop_unread(changed.graph)
    return bytes(changed.SerializeToString())


@dataclass(frozen=True)
class _Selected:
    """A tensor that a rewritten graph tells: the places of a selection, or the scores that it ranks."""

    number: int
    selection: _Selection
    tensor: str
    scores: bool = False

    @property
    def name(self) -> str:
        """The name under which it leaves the graph, and those around it."""
        return f"{self.selection.name}__{'scores' if self.scores else 'told'}_{self.number}"


class _Writer:
    """Rewrites the selections of a graph and of the branches in it, in the order of `selecting_nodes`.

    Args:
        replays: whether places are given.

    Attributes:
        inputs: the names of the given places.
    """

    def __init__(self, replays: bool) -> None:
        self.replays, self.int64, self.bool = replays, onnx.TensorProto.INT64, onnx.TensorProto.BOOL
        self.inputs: list[str] = []
        self._numbers = itertools.count()

    def rewrite(self, graph: Any) -> list[_Selected]:
        """Changes the graph; returns what it tells."""
        read, picked, nodes = _read_in(graph), list[_Selected](), list[Any]()
        for node in graph.node:
            selection = _selection_of(node, read)
            if selection is None:
                nodes.append(node)
                continue
            number = next(self._numbers)
            places = selection.name
            if self.replays:
                before, places, behind = self._give(node, selection, number)
            else:
                before, behind = [], []
            picked.append(_Selected(number, selection, places))
            if selection.scores:
                picked.append(_Selected(number, selection, selection.scores, scores=True))
            if selection.kind == "If":
                picked += self._open(node)
            nodes += [*before, node, *behind]
        _set(graph.node, nodes)
        return picked

    def _give(self, node: Any, selection: _Selection, number: int) -> tuple[list[Any], str, list[Any]]:
        """Lets what follows ``node`` read given places.

        Returns:
            The nodes before it, the tensor with the places that it picks itself, and the nodes after it.
        """
        places, own = f"{selection.name}__given_{number}", f"{selection.name}__own_{number}"
        self.inputs.append(places)
        if selection.kind in _MASKED:
            node.input[-1] = f"{places}_mask"
            return (
                [onnx.helper.make_node("Cast", [places], [f"{places}_mask"], to=self.bool)],
                selection.name,
                [],
            )
        behind = [onnx.helper.make_node("Identity", [places], [selection.name])]
        if selection.kind == "TopK" and node.output[0]:
            best = node.output[0]
            behind.append(
                onnx.helper.make_node("GatherElements", [node.input[0], places], [best], axis=selection.axis)
            )
            node.output[0] = f"{best}__own_{number}"
        node.output[-1] = own
        return [], own, behind

    def _open(self, node: Any) -> list[_Selected]:
        """Lets an If give what its branches tell; a branch that is not taken tells that nothing is picked."""
        branches = list(bodies_of(node))
        inside = [self.rewrite(branch) for branch in branches]
        for own in inside:
            for branch, others in zip(branches, inside, strict=True):
                if others is own:
                    tensors = _cast(branch, own)
                else:
                    tensors = []
                    for entry in own:
                        shape = (0,) if entry.scores else _NOWHERE.get(entry.selection.kind, (0,))
                        kind = _kind_of(entry)
                        value = onnx.helper.make_tensor(f"{entry.name}_nowhere", kind, shape, [])
                        branch.node.append(onnx.helper.make_node("Constant", [], [value.name], value=value))
                        tensors.append((value.name, kind))
                branch.output.extend(_described(name, kind) for name, kind in tensors)
            node.output.extend(entry.name for entry in own)
        return [replace(entry, tensor=entry.name) for own in inside for entry in own]


def _kind_of(entry: _Selected) -> int:
    return int(onnx.TensorProto.FLOAT if entry.scores else onnx.TensorProto.INT64)


def _cast(graph: Any, picked: Sequence[_Selected]) -> list[tuple[str, int]]:
    """Adds casts of what a graph tells; returns their results with their types."""
    results = [(f"{entry.name}_out", _kind_of(entry)) for entry in picked]
    for entry, (name, kind) in zip(picked, results, strict=True):
        graph.node.append(onnx.helper.make_node("Cast", [entry.tensor], [name], to=kind))
    return results


def _drop_unread(graph: Any) -> None:
    """Drops the nodes and constants of a graph on which no output depends."""
    needed, nodes = {value.name for value in graph.output}, []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(read_names(node))
            nodes.append(node)
    stored = [tensor for tensor in graph.initializer if tensor.name in needed]
    for field, messages in ((graph.node, nodes[::-1]), (graph.initializer, stored), (graph.value_info, [])):
        _set(field, messages)


def _set(field: Any, messages: Sequence[Any]) -> None:
    """Sets a repeated field to messages, some of which are its own and live no longer than it has them."""
    copies = [type(message).FromString(message.SerializeToString()) for message in messages]
    del field[:]
    field.extend(copies)


def _described(name: str, kind: int) -> Any:
    """Returns the description of a tensor of some type, of any shape."""
    value = onnx.ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = kind
    return value
