"""Stores the values of a graph in a TFLite file, with the axes in the order that an operator needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.graph.types import Node, TensorNode
from qtrace.targets.tflite.layout import KernelPlan, Moved, Order, file_shape, moves_values, natural
from qtrace.targets.tflite.writer import FileTensor, Grid, Inputs, TfliteWriter

__all__ = ["OrderedTensor", "Store", "StoredLayer"]


@dataclass(frozen=True, eq=False)
class OrderedTensor:
    """A tensor of the file with the order of its axes: the value of a node.

    Attributes:
        tensor: the tensor of the file.
        order: the order of the tensor's axes.
    """

    tensor: FileTensor
    order: Order

    @property
    def parts(self) -> tuple[FileTensor, Order]:
        """Returns the tensor and the order of its axes."""
        return self.tensor, self.order

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape in the graph."""
        return tuple(self.tensor.shape[self.order.index(axis)] for axis in range(len(self.order)))


@dataclass
class StoredLayer:
    """The parameters of a layer as the file stores them.

    Attributes:
        weight: the weight, in the layout of the operator.
        axis: the axis of the weight that counts output channels.
        bias: the bias; None until it is written.
    """

    weight: FileTensor
    axis: int
    bias: FileTensor | None = None


class Store:
    """The values of a graph in a file: constants, tensors, and moves that are not written yet.

    Attributes:
        plan: the kernels of the file.
        writer: the file.
        node_tensors: node -> its value in the file.
        moved: node -> a tensor of the file, and the moves from it to the node that are not written yet.
        values: node -> its value, for constants.
        lazy: node -> a function that computes its value, for constants that are rarely read.
        shifted: node -> its value for another batch size, for constants that depend on the batch size.
        integers: node -> the integers of a constant and their grid.
        batch: the size of the batch axis.
        sample_axes: node -> the axis that grows with the batch; another node has the first one, if any.
        layers: the result of a layer with a weight -> its parameters in the file.
        fixed: the node that makes the file work only for this batch size; "" for none.
    """

    def __init__(self, plan: KernelPlan, batch: int) -> None:
        self.plan, self.batch = plan, batch
        self.writer = TfliteWriter()
        self.node_tensors: dict[Node, OrderedTensor] = {}
        self.values: dict[Node, np.ndarray] = {}
        self.lazy: dict[Node, Callable[[], np.ndarray]] = {}
        self.shifted: dict[Node, np.ndarray] = {}
        self.integers: dict[Node, tuple[np.ndarray, Grid]] = {}
        self.layers: dict[TensorNode, StoredLayer] = {}
        self.fixed = ""
        self.sample_axes: dict[Node, int] = {}
        self.moved: dict[Node, tuple[OrderedTensor, Moved]] = {}
        self._materialized: dict[tuple[Node, Order], FileTensor] = {}
        self._arranged: dict[tuple[Node, Order, Order], FileTensor] = {}
        self._floats: dict[Node, FileTensor] = {}
        self._origin: dict[Node, FileTensor] = {}

    def shape(self, node: TensorNode) -> tuple[int, ...]:
        """Returns the shape of ``node`` in the graph."""
        return self.plan.shapes[node]

    def rank(self, node: TensorNode) -> int:
        """Returns the number of axes of ``node``."""
        return len(self.shape(node))

    # -- values ---------------------------------------------------------------------------------------

    def value(self, node: Node) -> np.ndarray | None:
        """Returns the value of ``node`` if it is a constant, else None."""
        if node in self.lazy:
            self.values[node] = self.lazy.pop(node)()
        numbers = self.values.get(node)
        if numbers is not None and node in self.shifted:
            self.fixed = self.fixed or node.name
        return numbers

    def number(self, value: Any, subject: str) -> int:
        """Returns a constant integer: ``value`` or the value of a node; errors begin with ``subject``."""
        if not isinstance(value, TensorNode):
            return int(value)
        numbers = self.value(value)
        if numbers is None:
            raise ExportError(
                f"{subject} is computed from values, but a TFLite file fixes it: use a constant"
            )
        return int(numbers.reshape(-1)[0])

    def get(self, node: TensorNode) -> OrderedTensor:
        """Returns the value of ``node``, integers where there are some; writes constants at first use."""
        if node not in self.node_tensors and node in self.moved:
            order = self.moved[node][1].nearest()
            self.node_tensors[node] = OrderedTensor(self.ordered(node, order), order)
        if node not in self.node_tensors:
            if node in self.integers:
                integers, grid = self.integers[node]
                tensor = self.writer.constant(f"{self.plan.graph.site_name(node)}_int", integers, grid)
            else:
                numbers = self.value(node)
                assert numbers is not None, node.name
                tensor = self.writer.constant(node.name, _plain(numbers))
            self.node_tensors[node] = OrderedTensor(tensor, natural(len(tensor.shape)))
        return self.node_tensors[node]

    def on_integers(self, node: TensorNode) -> bool:
        """Whether the file has integers of ``node``."""
        source = self.moved[node][0] if node in self.moved else self.node_tensors.get(node)
        return node in self.integers if source is None else source.tensor.grid is not None

    def integer_type(self, node: TensorNode) -> np.dtype:
        """Returns the type of the integers of ``node``."""
        source = self.moved[node][0] if node in self.moved else self.node_tensors.get(node)
        return self.integers[node][0].dtype if source is None else source.tensor.dtype

    def floats(self, source: OrderedTensor) -> OrderedTensor:
        """Converts a value to float32."""
        return OrderedTensor(self.as_floats(source.tensor), source.order)

    def as_floats(self, tensor: FileTensor) -> FileTensor:
        """Converts a tensor to float32."""
        grid = tensor.grid
        if grid is None:
            return tensor
        if tensor.index not in self._floats:
            name = tensor.name.removesuffix("_int")
            if tensor.value is not None:
                self._floats[tensor.index] = self.writer.constant(name, grid.floats(tensor.value))
            else:
                self._floats[tensor.index] = self.writer.add(
                    "DEQUANTIZE", [tensor], f"{name}_dq", tensor.shape, kind="DequantizeOptions"
                )
        return self._floats[tensor.index]

    def like(self, tensor: FileTensor, name: str, shape: Sequence[int]) -> FileTensor:
        """Adds a tensor of the type and grid of ``tensor``."""
        return self.writer.tensor(name, shape, tensor.dtype, tensor.grid)

    def add(self, code: str, inputs: Inputs, name: str, shape: Sequence[int], **options: Any) -> FileTensor:
        """Adds an operator whose result has the type and grid of its first input."""
        first = inputs[0]
        assert isinstance(first, FileTensor)
        return self.writer.add(code, inputs, name, shape, first.dtype, first.grid, **options)

    # -- orders ---------------------------------------------------------------------------------------

    def arrange(self, source: OrderedTensor, order: Order) -> FileTensor:
        """Brings axes into another order, by a transpose, or by a reshape if that is enough."""
        if source.order == order:
            return source.tensor
        key = (source.tensor.index, source.order, order)
        if key not in self._arranged:
            self._arranged[key] = self._rearranged(source, order)
        return self._arranged[key]

    def _rearranged(self, source: OrderedTensor, order: Order) -> FileTensor:
        tensor, shape = source.tensor, file_shape(source.shape, order)
        moves = [source.order.index(axis) for axis in order]
        if tensor.value is not None:
            return self.writer.constant(tensor.name, tensor.value.transpose(moves), tensor.grid)
        if not moves_values(source.shape, source.order, order):
            return self.reshaped(tensor, shape, order.index(0))
        return self.add("TRANSPOSE", [tensor, moves], f"{tensor.name}_moved", shape, kind="TransposeOptions")

    def moved_from(self, node: TensorNode) -> tuple[OrderedTensor, Moved]:
        """Returns the tensor with the values of ``node``, and the moves that are not written yet."""
        if node in self.node_tensors or node not in self.moved:
            source = self.get(node)
            return source, Moved.of(source.shape, source.order, self.sample_axes.get(node, 0))
        return self.moved[node]

    def move(self, node: TensorNode, source: OrderedTensor, moved: Moved) -> None:
        """Records ``node`` as moved values of ``source``; nothing is written until it is read."""
        self.moved[node] = (source, moved)
        self.node_tensors.pop(node, None)

    def ordered(self, node: TensorNode, order: Order) -> FileTensor:
        """Returns the value of ``node`` in ``order``; writes its moves if they are not written yet."""
        if node in self.node_tensors or node not in self.moved:
            return self.arrange(self.get(node), order)
        key = (node, order)
        if key not in self._materialized:
            self._materialized[key] = self.materialized(node.name, *self.moved[node], order)
        return self._materialized[key]

    def materialized(self, name: str, source: OrderedTensor, moved: Moved, order: Order) -> FileTensor:
        """Writes moves: a reshape into atoms, a transpose and a reshape into axes, as far as needed."""
        name = f"{name}_int" if source.tensor.grid is not None else name
        atoms = [atom for axis in order for atom in moved.axes[axis]]
        tensor, now = source.tensor, moved.file_atoms
        if [a for a in now if moved.wide(a)] != [a for a in atoms if moved.wide(a)]:
            now, atoms = ([a for a in side if moved.wide(a)] for side in (now, atoms))
            tensor = self.reshaped(
                tensor, [moved.size(a) for a in now], now.index(moved.batch) if moved.batch in now else None
            )
            moves = [now.index(a) for a in atoms]
            shape = [tensor.shape[i] for i in moves]
            if tensor.value is not None:
                tensor = self.writer.constant(name, tensor.value.transpose(moves), tensor.grid)
            else:
                tensor = self.add(
                    "TRANSPOSE", [tensor, moves], f"{name}_moved", shape, kind="TransposeOptions"
                )
        free = next((i for i, axis in enumerate(order) if moved.batch in moved.axes[axis]), None)
        return self.reshaped(tensor, file_shape(moved.shape, order), free, name)

    def reshaped(
        self, tensor: FileTensor, shape: Sequence[int], free: int | None, name: str = ""
    ) -> FileTensor:
        """Reshapes a tensor of the file.

        Args:
            tensor: the tensor.
            shape: the new shape.
            free: the axis whose size follows the batch size; None for none.
            name: the name of the result.
        """
        shape = tuple(int(n) for n in shape)
        if shape == tensor.shape:
            return tensor
        if tensor.value is not None:
            return self.writer.constant(name or tensor.name, tensor.value.reshape(shape), tensor.grid)
        tensor = self._origin.get(tensor.index, tensor)  # of two reshapes in a row, one is enough
        target = [-1 if i == free else n for i, n in enumerate(shape)]
        options = {"kind": "ReshapeOptions", "newShape": np.array(target, np.int32)}
        result = self.add("RESHAPE", [tensor, target], name or f"{tensor.name}_shaped", shape, **options)
        self._origin[result.index] = tensor
        return result

    def widened(self, source: OrderedTensor, rank: int) -> OrderedTensor:
        """Adds axes of size 1 in front, as broadcasting does, up to ``rank`` axes."""
        more = rank - len(source.order)
        if more <= 0:
            return source
        order = (*range(more), *(axis + more for axis in source.order))
        shape = (1,) * more + source.tensor.shape
        return OrderedTensor(self.reshaped(source.tensor, shape, None), order)

    def cut(self, source: FileTensor, target: FileTensor, parts: Mapping[int, tuple[int, int, int]]) -> None:
        """Fills ``target`` with a part of ``source``: file axis -> start, end, step; other axes whole."""
        rank = range(len(source.shape))
        ranges = [parts.get(i, (0, source.shape[i], 1)) for i in rank]
        mask = sum(1 << i for i in rank if i not in parts)  # these have the size that there is
        options = {"beginMask": mask, "endMask": mask}
        inputs: Inputs = [source, *zip(*ranges, strict=True)]
        self.writer.op("STRIDED_SLICE", inputs, [target], "StridedSliceOptions", **options)

    def put(self, node: TensorNode, tensor: FileTensor, order: Order) -> None:
        """Makes ``tensor`` the value of ``node``."""
        self.node_tensors[node] = OrderedTensor(tensor, order)


def _plain(value: np.ndarray) -> np.ndarray:
    """Converts ``value`` to a type that the file has."""
    narrow = {np.dtype(np.float64): np.float32, np.dtype(np.uint8): np.int32, np.dtype(np.int16): np.int32}
    return value.astype(narrow.get(value.dtype, value.dtype))
