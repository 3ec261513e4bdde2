"""The values of a graph in a TFLite file, with their axes in the order that an operator needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.tflite.layout import Order, file_shape, moves_values, natural
from qtrace.export.tflite.moved import Moved
from qtrace.export.tflite.plan import Plan
from qtrace.export.tflite.writer import Grid, Inputs, Stored, TfliteWriter
from qtrace.graph.types import Node, TensorNode

__all__ = ["Held", "Store"]


@dataclass(frozen=True, eq=False)
class Held:
    """The value of a node in the file.

    Attributes:
        stored: the tensor.
        order: the order of its axes.
    """

    stored: Stored
    order: Order

    @property
    def parts(self) -> tuple[Stored, Order]:
        """The tensor and the order of its axes."""
        return self.stored, self.order

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the graph."""
        return tuple(self.stored.shape[self.order.index(axis)] for axis in range(len(self.order)))


class Store:
    """The values of a graph in a file.

    Attributes:
        plan: the graph.
        writer: the file.
        held: node -> its value in the file.
        moved: node -> a value in the file, and moves that make it the node's; not written yet.
        values: node -> its numbers, if they are fixed.
        lazy: how to compute such numbers, for those that few ask for.
        shifted: the same, computed with another batch size, where that makes a difference.
        integers: node -> the integers of a fixed value and what they mean.
        batch: the size of the batch axis.
        fixed: the node that makes the file work for this batch size alone; "" for none.
    """

    def __init__(self, plan: Plan, batch: int) -> None:
        self.plan, self.batch = plan, batch
        self.writer = TfliteWriter()
        self.held: dict[Node, Held] = {}
        self.values: dict[Node, np.ndarray] = {}
        self.lazy: dict[Node, Callable[[], np.ndarray]] = {}
        self.shifted: dict[Node, np.ndarray] = {}
        self.integers: dict[Node, tuple[np.ndarray, Grid]] = {}
        self.fixed = ""
        self.moved: dict[Node, tuple[Held, Moved]] = {}
        self._made: dict[tuple[Node, Order], Stored] = {}
        self._arranged: dict[tuple[Node, Order, Order], Stored] = {}
        self._floats: dict[Node, Stored] = {}
        self._origin: dict[Node, Stored] = {}

    def shape(self, node: TensorNode) -> tuple[int, ...]:
        """The shape of a node in the graph."""
        return self.plan.shapes[node]

    def rank(self, node: TensorNode) -> int:
        """How many axes a node has."""
        return len(self.shape(node))

    # -- values ---------------------------------------------------------------------------------------

    def value(self, node: Node) -> np.ndarray | None:
        """The numbers of a node if they are fixed."""
        if node in self.lazy:
            self.values[node] = self.lazy.pop(node)()
        numbers = self.values.get(node)
        if numbers is not None and node in self.shifted:
            self.fixed = self.fixed or node.name
        return numbers

    def number(self, value: Any, what: str) -> int:
        """A fixed integer: a number, or a node that has one."""
        if not isinstance(value, TensorNode):
            return int(value)
        numbers = self.value(value)
        if numbers is None:
            raise ExportError(f"{what} is computed from values, but a TFLite file fixes it: use a constant")
        return int(numbers.reshape(-1)[0])

    def get(self, node: TensorNode) -> Held:
        """The value of a node, integers where there are some; a fixed one is written when first read."""
        if node not in self.held and node in self.moved:
            order = self.moved[node][1].nearest()
            self.held[node] = Held(self.ordered(node, order), order)
        if node not in self.held:
            if node in self.integers:
                integers, grid = self.integers[node]
                stored = self.writer.constant(f"{self.plan.graph.site_name(node)}_int", integers, grid)
            else:
                numbers = self.value(node)
                assert numbers is not None, node.name
                stored = self.writer.constant(node.name, _plain(numbers))
            self.held[node] = Held(stored, natural(len(stored.shape)))
        return self.held[node]

    def on_integers(self, node: TensorNode) -> bool:
        """Whether the file has integers of this node."""
        source = self.moved.get(node)
        held = self.held.get(node) if source is None else source[0]
        return node in self.integers if held is None else held.stored.grid is not None

    def integer_type(self, node: TensorNode) -> np.dtype:
        """The type of the integers of a node that has some."""
        source = self.moved.get(node)
        held = self.held.get(node) if source is None else source[0]
        return self.integers[node][0].dtype if held is None else held.stored.dtype

    def floats(self, held: Held) -> Held:
        """The same value in float32."""
        return Held(self.as_floats(held.stored), held.order)

    def as_floats(self, stored: Stored) -> Stored:
        """The same tensor in float32."""
        grid = stored.grid
        if grid is None:
            return stored
        if stored.index not in self._floats:
            name = stored.name.removesuffix("_int")
            if stored.value is not None:
                self._floats[stored.index] = self.writer.constant(name, grid.floats(stored.value))
            else:
                self._floats[stored.index] = self.writer.add(
                    "DEQUANTIZE", [stored], f"{name}_dq", stored.shape, kind="DequantizeOptions"
                )
        return self._floats[stored.index]

    def like(self, stored: Stored, name: str, shape: Sequence[int]) -> Stored:
        """A tensor of the type and grid of another one."""
        return self.writer.tensor(name, shape, stored.dtype, stored.grid)

    def add(self, code: str, inputs: Inputs, name: str, shape: Sequence[int], **options: Any) -> Stored:
        """Adds an operator whose result has the type and grid of its first input."""
        first = inputs[0]
        assert isinstance(first, Stored)
        return self.writer.add(code, inputs, name, shape, first.dtype, first.grid, **options)

    # -- orders ---------------------------------------------------------------------------------------

    def arrange(self, held: Held, order: Order) -> Stored:
        """The value with its axes in another order: transposed, or reshaped if that is enough."""
        if held.order == order:
            return held.stored
        key = (held.stored.index, held.order, order)
        if key not in self._arranged:
            self._arranged[key] = self._rearranged(held, order)
        return self._arranged[key]

    def _rearranged(self, held: Held, order: Order) -> Stored:
        stored, shape = held.stored, file_shape(held.shape, order)
        moves = [held.order.index(axis) for axis in order]
        if stored.value is not None:
            return self.writer.constant(stored.name, stored.value.transpose(moves), stored.grid)
        if not moves_values(held.shape, held.order, order):
            return self.reshaped(stored, shape, order.index(0))
        return self.add("TRANSPOSE", [stored, moves], f"{stored.name}_moved", shape, kind="TransposeOptions")

    def moved_from(self, node: TensorNode) -> tuple[Held, Moved]:
        """Where the values of a node stand, and what moves are still to be made."""
        if node in self.held or node not in self.moved:
            held = self.get(node)
            return held, Moved.of(held.shape, held.order)
        return self.moved[node]

    def move(self, node: TensorNode, held: Held, moved: Moved) -> None:
        """Says that ``node`` has the values of ``held``, moved; nothing is written until it is read."""
        self.moved[node] = (held, moved)
        self.held.pop(node, None)

    def ordered(self, node: TensorNode, order: Order) -> Stored:
        """The value of a node with its axes in an order; moves that were put off are made at once."""
        if node in self.held or node not in self.moved:
            return self.arrange(self.get(node), order)
        key = (node, order)
        if key not in self._made:
            self._made[key] = self.materialized(node.name, *self.moved[node], order)
        return self._made[key]

    def materialized(self, name: str, held: Held, moved: Moved, order: Order) -> Stored:
        """One reshape into atoms, one transpose and one reshape into axes, as far as they are needed."""
        name = f"{name}_int" if held.stored.grid is not None else name
        atoms = [atom for axis in order for atom in moved.axes[axis]]
        stored, now = held.stored, moved.stored
        if [a for a in now if moved.wide(a)] != [a for a in atoms if moved.wide(a)]:
            now, atoms = ([a for a in side if moved.wide(a)] for side in (now, atoms))
            stored = self.reshaped(stored, [moved.size(a) for a in now], _batch(now))
            moves = [now.index(a) for a in atoms]
            shape = [stored.shape[i] for i in moves]
            if stored.value is not None:
                stored = self.writer.constant(name, stored.value.transpose(moves), stored.grid)
            else:
                stored = self.add(
                    "TRANSPOSE", [stored, moves], f"{name}_moved", shape, kind="TransposeOptions"
                )
        free = next((i for i, axis in enumerate(order) if (0, 0) in moved.axes[axis]), None)
        return self.reshaped(stored, file_shape(moved.shape, order), free, name)

    def reshaped(self, stored: Stored, shape: Sequence[int], free: int | None, name: str = "") -> Stored:
        """The same values in another shape of the file.

        Args:
            stored: the values.
            shape: the new shape.
            free: the axis that follows the batch size; None for none.
            name: of the result.
        """
        shape = tuple(int(n) for n in shape)
        if shape == stored.shape:
            return stored
        if stored.value is not None:
            return self.writer.constant(name or stored.name, stored.value.reshape(shape), stored.grid)
        stored = self._origin.get(stored.index, stored)  # of two reshapes in a row, one is enough
        target = [-1 if i == free else n for i, n in enumerate(shape)]
        options = {"kind": "ReshapeOptions", "newShape": np.array(target, np.int32)}
        result = self.add("RESHAPE", [stored, target], name or f"{stored.name}_shaped", shape, **options)
        self._origin[result.index] = stored
        return result

    def widened(self, held: Held, rank: int) -> Held:
        """The value with axes of size 1 in front, as broadcasting adds them."""
        more = rank - len(held.order)
        if more <= 0:
            return held
        order = (*range(more), *(axis + more for axis in held.order))
        shape = (1,) * more + held.stored.shape
        return Held(self.reshaped(held.stored, shape, None), order)

    def cut(self, source: Stored, target: Stored, parts: Mapping[int, tuple[int, int, int]]) -> None:
        """Fills ``target`` with a part of ``source``: axis of the file -> start, end, step; others whole."""
        rank = range(len(source.shape))
        ranges = [parts.get(i, (0, source.shape[i], 1)) for i in rank]
        mask = sum(1 << i for i in rank if i not in parts)  # these have the size that there is
        options = {"beginMask": mask, "endMask": mask}
        inputs: Inputs = [source, *zip(*ranges, strict=True)]
        self.writer.op("STRIDED_SLICE", inputs, [target], "StridedSliceOptions", **options)

    def put(self, node: TensorNode, stored: Stored, order: Order) -> None:
        """Says that a tensor holds the value of a node."""
        self.held[node] = Held(stored, order)


def _batch(atoms: list[tuple[int, int]]) -> int | None:
    return atoms.index((0, 0)) if (0, 0) in atoms else None


def _plain(value: np.ndarray) -> np.ndarray:
    """Numbers of a type that the file has."""
    narrow = {np.dtype(np.float64): np.float32, np.dtype(np.uint8): np.int32, np.dtype(np.int16): np.int32}
    return value.astype(narrow.get(value.dtype, value.dtype))
