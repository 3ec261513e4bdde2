"""Fragments that select: which places their nodes pick, and the fragment with the places of another run.

An opaque node often goes from a suppression to the boxes that it keeps, as their number depends on values.
Its outputs alone do not tell which boxes they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.onnxfile.fragment import Fragment

__all__ = ["SelectingFragment", "selecting_nodes"]

# Op -> the output that has the places.
_PLACES = {"NonMaxSuppression": 0, "NonZero": 0, "TopK": 1, "ArgMax": 0, "ArgMin": 0}
_LISTS = ("NonMaxSuppression", "NonZero")
_WIDTH = 10  # numbers of a place: the selection, then an index of up to eight, and a number


@dataclass(frozen=True)
class _Selection:
    """A node that selects.

    Attributes:
        index: its place among the nodes.
        kind: its op.
        name: the tensor of its places.
        axis: the axis along which it ranks; 0 for one that lists places.
    """

    index: int
    kind: str
    name: str
    axis: int = 0

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Returns one row for each place: of a list its numbers, else its index in ``places`` and itself."""
        if self.kind == "NonZero":
            return places.T
        if self.kind == "NonMaxSuppression":
            return places
        indices = np.indices(places.shape).reshape(places.ndim, places.size)
        return np.concatenate([indices, places.reshape(1, -1)]).T

    def places(self, rows: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Returns the places of ``rows``, which may be more or fewer than those of this run, ``like``."""
        if self.kind == "NonZero":
            return np.ascontiguousarray(rows[:, : len(like)].T)
        if self.kind == "NonMaxSuppression":
            return rows[:, :3]
        if not len(rows):
            return np.zeros(like.shape if not like.size else (0, *like.shape[1:]), np.int64)
        indices = rows[:, : like.ndim]
        whole = np.zeros(indices.max(axis=0) + 1, np.int64)
        whole[tuple(indices.T)] = rows[:, like.ndim]
        return whole


def selecting_nodes(model: Any) -> tuple[_Selection, ...]:
    """Returns the nodes of a model that pick places by the order or the size of values, in order."""
    read = {name for node in model.graph.node for name in node.input} | {v.name for v in model.graph.output}
    selections = []
    for index, node in enumerate(model.graph.node):
        place = _PLACES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        name = node.output[place] if place is not None and place < len(node.output) else ""
        if not name or name not in read:
            continue
        attributes = {a.name: a.i for a in node.attribute}
        axis = 0 if node.op_type in _LISTS else attributes.get("axis", -1 if node.op_type == "TopK" else 0)
        selections.append(_Selection(index, node.op_type, name, axis))
    return tuple(selections)


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

    def run(self, values: Sequence[np.ndarray], table: np.ndarray) -> list[np.ndarray]:
        """Computes the outputs for the places of another run, as `places` gives them."""
        told = self._told(values)
        given = [
            own.places(table[table[:, 0] == number, 1:], like)
            for number, (own, like) in enumerate(zip(self._selections, told, strict=True))
        ]
        return self._taking.run([*values, *given])

    def _told(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self._telling.run(values)[-len(self._selections) :]


def _told(model: Any, selections: Sequence[_Selection]) -> bytes:
    """Returns the model with the places as further outputs, behind its own."""
    from onnx import helper

    changed = type(model).FromString(model.SerializeToString())
    for own in selections:
        name = f"{own.name}__told"
        changed.graph.node.append(helper.make_node("Identity", [own.name], [name]))
        changed.graph.output.append(_integers(name))
    return bytes(changed.SerializeToString())


def _taken(model: Any, selections: Sequence[_Selection]) -> bytes:
    """Returns the model with the places as further inputs, behind its own, in the place of the nodes."""
    from onnx import helper

    changed = type(model).FromString(model.SerializeToString())
    nodes = [[node] for node in changed.graph.node]
    for own in selections:
        (node,), name = nodes[own.index], f"{own.name}__given"
        changed.graph.input.append(_integers(name))
        nodes[own.index] = [helper.make_node("Identity", [name], [own.name])]
        if own.kind == "TopK" and node.output[0]:
            values = [node.input[0], name], [node.output[0]]
            nodes[own.index].append(helper.make_node("GatherElements", *values, axis=own.axis))
    del changed.graph.node[:]
    changed.graph.node.extend(node for group in nodes for node in group)
    return bytes(changed.SerializeToString())


def _integers(name: str) -> Any:
    """Returns the description of a tensor of int64, of any shape."""
    import onnx

    value = onnx.ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = onnx.TensorProto.INT64
    return value
