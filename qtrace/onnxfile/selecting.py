"""Fragments that select: which places their nodes pick, and the fragment with the places of another run.

An opaque node often goes from a suppression to the boxes that it keeps, as their number depends on values.
Its outputs alone do not tell which boxes they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qtrace.onnxfile.bodies import bodies_of, own_operators, read_names
from qtrace.onnxfile.fragment import Fragment

__all__ = ["RankedPlaces", "SelectingFragment", "selecting_nodes", "selects_inside"]

# Op -> the output that has the places; of Compress the mask among its inputs has them.
_PLACES = {"NonMaxSuppression": 0, "NonZero": 0, "TopK": 1, "ArgMax": 0, "ArgMin": 0}
_MASKED = "Compress"
_LISTS = ("NonMaxSuppression", "NonZero", _MASKED)
_OWN = ("", "ai.onnx")
_WIDTH = 10  # numbers of a place: the selection, then an index of up to eight, and a number


@dataclass(frozen=True)
class _Selection:
    """A node that selects.

    Attributes:
        index: its place among the nodes.
        kind: its op.
        name: the tensor of its places.
        axis: the axis along which it ranks; 0 for one that lists places.
        scores: the tensor that it ranks; "" for one that lists places.
        falling: whether the largest score is the best.
    """

    index: int
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
        if self.kind == _MASKED:
            return np.flatnonzero(places)[:, None]
        indices = np.indices(places.shape).reshape(places.ndim, places.size)
        return np.concatenate([indices, places.reshape(1, -1)]).T

    def columns(self, places: np.ndarray, rank: int) -> np.ndarray:
        """Returns the places of a ranking of ``rank`` axes with those of one order on the last axis."""
        return np.moveaxis(places, self.axis, -1) if places.ndim == rank else places[..., None]

    def places(self, rows: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Returns the places of ``rows``, which may be more or fewer than those of this run, ``like``."""
        if self.kind == "NonZero":
            return np.ascontiguousarray(rows[:, : len(like)].T)
        if self.kind == "NonMaxSuppression":
            return rows[:, :3]
        if self.kind == _MASKED:
            mask = np.zeros(like.shape, np.int64)
            mask[rows[rows[:, 0] < len(mask), 0]] = 1
            return mask
        if not len(rows):
            return np.zeros(like.shape if not like.size else (0, *like.shape[1:]), np.int64)
        indices = rows[:, : like.ndim]
        whole = np.zeros(indices.max(axis=0) + 1, np.int64)
        whole[tuple(indices.T)] = rows[:, like.ndim]
        return whole


def selecting_nodes(model: Any) -> tuple[_Selection, ...]:
    """Returns the nodes of a model that pick places by the order or the size of values, in order."""
    read = {name for node in model.graph.node for name in read_names(node)}
    read |= {value.name for value in model.graph.output}
    selections = []
    for index, node in enumerate(model.graph.node):
        if node.domain not in _OWN:
            continue
        if node.op_type == _MASKED:
            selections.append(_Selection(index, _MASKED, node.input[1]))
            continue
        place = _PLACES.get(node.op_type)
        name = node.output[place] if place is not None and place < len(node.output) else ""
        if not name or name not in read:
            continue
        if node.op_type in _LISTS:
            selections.append(_Selection(index, node.op_type, name))
            continue
        attributes = {a.name: a.i for a in node.attribute}
        axis = attributes.get("axis", -1 if node.op_type == "TopK" else 0)
        falling = node.op_type == "ArgMax" or (node.op_type == "TopK" and attributes.get("largest", 1) == 1)
        selections.append(_Selection(index, node.op_type, name, axis, node.input[0], falling))
    return tuple(selections)


def selects_inside(model: Any) -> bool:
    """Returns whether a body of control flow or a function selects, where no run tells its places."""
    bodies = [body for node in model.graph.node for body in bodies_of(node)]
    kinds = {kind for body in (*bodies, *model.functions) for kind in own_operators(body)}
    return bool(kinds & {*_PLACES, _MASKED})


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


class SelectingFragment:
    """Runs a fragment and tells its places, or takes given ones.

    Args:
        model: the model of the fragment, which has nodes that select; it is not changed.
    """

    def __init__(self, model: Any) -> None:
        self._selections = selecting_nodes(model)
        self._telling = Fragment(_told(model, self._selections))
        self._taking = Fragment(_taken(model, self._selections))

    def places(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the places, one a row, of all selections by the values: the selection, then its numbers."""
        tables = []
        for number, (own, places) in enumerate(zip(self._selections, self._told(values), strict=True)):
            rows = own.rows(places)
            table = np.full((len(rows), _WIDTH), -1, np.int64)
            table[:, 0], table[:, 1 : 1 + rows.shape[1]] = number, rows
            tables.append(table)
        return np.concatenate(tables)

    def rankings(
        self, values: Sequence[np.ndarray], own: np.ndarray, given: np.ndarray
    ) -> dict[int, RankedPlaces]:
        """Returns the rankings among the selections, by their numbers, with the places of two tables.

        Args:
            values: the values that are ranked.
            own: the places by these values.
            given: the places of another run; a ranking of so many others is left out.
        """
        numbers = [number for number, selection in enumerate(self._selections) if selection.scores]
        if not numbers:
            return {}
        run = self._telling.run(values)[-len(self._selections) - len(numbers) :]
        rankings = {}
        for number, scores in zip(numbers, run[len(self._selections) :], strict=True):
            selection, like = self._selections[number], run[number]
            tables = [table[table[:, 0] == number, 1:] for table in (own, given)]
            both = [selection.places(rows, like) for rows in tables]
            if (
                both[0].shape != both[1].shape
                or not both[0].size
                or both[1].max() >= scores.shape[selection.axis]
            ):
                continue
            columns = [selection.columns(places, scores.ndim) for places in both]
            ranked = np.moveaxis(scores if selection.falling else -scores, selection.axis, -1)
            rankings[number] = RankedPlaces(ranked, columns[0], columns[1])
        return rankings

    def run(self, values: Sequence[np.ndarray], table: np.ndarray) -> list[np.ndarray]:
        """Computes the outputs for the places of another run, as `places` gives them."""
        told = self._told(values)
        given = [
            own.places(table[table[:, 0] == number, 1:], like)
            for number, (own, like) in enumerate(zip(self._selections, told, strict=True))
        ]
        return self._taking.run([*values, *given])

    def _told(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        rankings = sum(1 for selection in self._selections if selection.scores)
        told = self._telling.run(values)
        return told[len(told) - rankings - len(self._selections) : len(told) - rankings]


def _told(model: Any, selections: Sequence[_Selection]) -> bytes:
    """Returns the model with the places as further outputs, behind its own, and behind these the scores."""
    from onnx import TensorProto, helper

    changed = type(model).FromString(model.SerializeToString())
    places = [(own.name, TensorProto.INT64) for own in selections]
    scores = [(own.scores, TensorProto.FLOAT) for own in selections if own.scores]
    for number, (tensor, kind) in enumerate([*places, *scores]):
        name = f"{tensor}__told_{number}"
        changed.graph.node.append(helper.make_node("Cast", [tensor], [name], to=kind))
        changed.graph.output.append(_described(name, kind))
    return bytes(changed.SerializeToString())


def _taken(model: Any, selections: Sequence[_Selection]) -> bytes:
    """Returns the model with the places as further inputs, behind its own, in the place of the nodes."""
    from onnx import TensorProto, helper

    changed = type(model).FromString(model.SerializeToString())
    nodes = [[node] for node in changed.graph.node]
    for number, own in enumerate(selections):
        (node,), name = nodes[own.index], f"{own.name}__given_{number}"
        changed.graph.input.append(_described(name, TensorProto.INT64))
        if own.kind == _MASKED:
            node.input[1] = f"{name}_mask"
            nodes[own.index].insert(0, helper.make_node("Cast", [name], [node.input[1]], to=TensorProto.BOOL))
            continue
        nodes[own.index] = [helper.make_node("Identity", [name], [own.name])]
        if own.kind == "TopK" and node.output[0]:
            values = [node.input[0], name], [node.output[0]]
            nodes[own.index].append(helper.make_node("GatherElements", *values, axis=own.axis))
    del changed.graph.node[:]
    changed.graph.node.extend(node for group in nodes for node in group)
    return bytes(changed.SerializeToString())


def _described(name: str, kind: int) -> Any:
    """Returns the description of a tensor of some type, of any shape."""
    import onnx

    value = onnx.ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = kind
    return value
