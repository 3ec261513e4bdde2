"""What builds a TFLite file: its options, the operands of operators, and the values that it stores.

Values are stored with the axes in the order that an operator needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ai_edge_litert.schema_py_generated import ActivationFunctionType

from qtrace.errors import ExportError
from qtrace.export.detections import Suppression
from qtrace.graph.types import Node, TensorNode
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite
from qtrace.targets.tflite.layout import (
    FUSED,
    FusedOp,
    KernelPlan,
    Moved,
    Order,
    bounds,
    file_shape,
    moves_values,
    natural,
)
from qtrace.targets.tflite.writer import TYPES, FileTensor, Grid, Inputs, TfliteWriter

__all__ = [
    "BuildOptions",
    "Builder",
    "Emitter",
    "OpInFloat",
    "OrderedTensor",
    "Store",
    "StoredLayer",
    "Target",
    "allowing",
    "as_type",
    "check_type",
    "common_order",
    "integer_type",
    "number",
    "operands",
]

Kinds = np.dtype | Sequence[np.dtype] | None


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
        return tuple(int(n) for n in node.shape)

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
                    "DEQUANTIZE", [tensor], f"{name}_dq", tensor.shape
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
        tensor = source.tensor
        if tensor.value is None and not moves_values(source.shape, source.order, order):
            return self.reshaped(tensor, file_shape(source.shape, order), order.index(0))
        return self._transposed(tensor, [source.order.index(axis) for axis in order], tensor.name)

    def _transposed(self, tensor: FileTensor, axes: list[int], name: str) -> FileTensor:
        if tensor.value is not None:
            return self.writer.constant(name, tensor.value.transpose(axes), tensor.grid)
        return self.add("TRANSPOSE", [tensor, axes], f"{name}_moved", [tensor.shape[i] for i in axes])

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
            tensor = self._transposed(tensor, [now.index(a) for a in atoms], name)
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
        size, name = np.array(target, np.int32), name or f"{tensor.name}_shaped"
        result = self.add("RESHAPE", [tensor, target], name, shape, newShape=size)
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
        inputs: Inputs = [source, *zip(*ranges, strict=True)]
        self.writer.op("STRIDED_SLICE", inputs, [target], beginMask=mask, endMask=mask)

    def put(self, node: TensorNode, tensor: FileTensor, order: Order) -> None:
        """Makes ``tensor`` the value of ``node``."""
        self.node_tensors[node] = OrderedTensor(tensor, order)


def _plain(value: np.ndarray) -> np.ndarray:
    """Converts ``value`` to a type that the file has."""
    narrow = {np.dtype(np.float64): np.float32, np.dtype(np.uint8): np.int32, np.dtype(np.int16): np.int32}
    return value.astype(narrow.get(value.dtype, value.dtype))


def common_order(sources: Sequence[OrderedTensor]) -> Order:
    """Returns the order of most values; constants do not count, since they are rearranged for free."""
    counts: Counter[Order] = Counter()
    for source in sources:
        counts[source.order] += 0 if source.tensor.value is not None else int(np.prod(source.tensor.shape))
    return counts.most_common(1)[0][0]


def operands(b: Builder, call: OpCall, values: Sequence[Any], kind: Kinds) -> tuple[list[FileTensor], Order]:
    """Returns operands with as many axes as the result of their op. Single numbers are without axes.

    Args:
        b: the file.
        call: the op.
        values: nodes, numbers and arrays.
        kind: the type of all operands, or one type for each; None for integers on their grids.

    Returns:
        The operands, and the order of the result's axes.
    """
    rank = b.rank(call.out)
    kinds = [kind] * len(values) if kind is None or isinstance(kind, np.dtype) else list(kind)
    each = list(zip(values, kinds, strict=True))
    read = [None if _is_number(v) else _read(b, call, v, k) for v, k in each]
    sources = [b.widened(h, rank) for h in read if h is not None]
    # Operands that are broadcast follow the order of the others.
    full = [
        h
        for h, before in zip(sources, (h for h in read if h is not None), strict=True)
        if len(before.order) == rank
    ]
    order = common_order(full or sources) if sources else natural(rank)
    arranged = iter([b.arrange(h, order) for h in sources])
    return [number(b, call, v, k) if _is_number(v) else next(arranged) for v, k in each], order


def as_type(b: Builder, tensor: FileTensor, kind: np.dtype) -> FileTensor:
    """Converts a tensor to ``kind``."""
    tensor = b.as_floats(tensor)
    if tensor.dtype == kind:
        return tensor
    if tensor.value is not None:
        return b.writer.constant(tensor.name, tensor.value.astype(kind))
    result = b.writer.tensor(f"{tensor.name}_{kind.name}", tensor.shape, kind)
    b.writer.op("CAST", [tensor], [result])
    return result


def _is_number(value: Any) -> bool:
    return not isinstance(value, TensorNode) and np.size(value) == 1


def _read(b: Builder, call: OpCall, value: Any, kind: np.dtype | None) -> OrderedTensor:
    if isinstance(value, TensorNode):
        source = b.get(value)
        return source if kind is None else OrderedTensor(as_type(b, source.tensor, kind), source.order)
    if kind is None:
        raise ExportError(
            f"{call.out.name}: its operand is an array that is not quantized: make it a Tensor or Parameter "
            f"of the module, or {allowing(call.kind)}"
        )
    array = np.asarray(value, kind)
    return OrderedTensor(b.writer.constant(f"{call.out.name}_operand", array), natural(array.ndim))


def number(b: Builder, call: OpCall, value: Any, kind: np.dtype | None) -> FileTensor:
    """Writes a single number as a tensor without axes."""
    scalar = np.asarray(value).reshape(())
    if kind is not None:
        return b.writer.constant(f"number_{scalar.item()}", scalar.astype(kind))
    # One step of a grid whose scale is the number: nothing is rounded.
    real = np.float32(scalar.item())
    steps = np.array(np.sign(real), b.get(call.inputs[0]).tensor.dtype)
    return b.writer.constant(f"number_{real:g}_int", steps, Grid((float(abs(real)) or 1.0,), (0,)))


def _number(op: FusedOp) -> int:
    """Returns the schema's number of the activation function that an operator fuses."""
    name = "NONE" if op.clamp is None else FUSED[bounds(op.clamp)]
    return int(getattr(ActivationFunctionType, name))


@dataclass(frozen=True)
class BuildOptions:
    """Options of the TFLite export.

    Attributes:
        io: "float32" or "int8": the type of the model's float inputs and outputs.
        functions: "float", "table" or "native": the form of functions of one value between integers.
        allow_float: op kinds that may compute in float where the graph computes on integers.
        suppression: how the file chooses boxes; None for only the outputs of the graph.
    """

    io: str = "float32"
    functions: str = "float"
    allow_float: frozenset[str] = frozenset()
    suppression: Suppression | None = None


@dataclass(frozen=True, eq=False)
class Target:
    """The output tensor of an operator, and what becomes of the activation function after it.

    Attributes:
        tensor: the output tensor.
        order: the order of the tensor's axes.
        activation: the schema's number of the activation function that the operator fuses.
        clamp: the activation function that has to follow as an operator; None for none.
    """

    tensor: FileTensor
    order: Order
    activation: int = ActivationFunctionType.NONE
    clamp: OpCall | None = None


@dataclass(frozen=True)
class OpInFloat:
    """An op that the file computes in float.

    Attributes:
        name: the name of its result in the graph.
        kind: the op's kind.
        reason: why no integer kernel computes it.
    """

    name: str
    kind: str
    reason: str


class Builder(Store):
    """Builds one file, op by op.

    Attributes:
        options: the options of the export.
        float_ops: the ops that compute in float, in the order of the graph.
        inexact: the nodes of the sites whose kernels do not round ties as the graph does.
    """

    def __init__(self, plan: KernelPlan, options: BuildOptions, batch: int) -> None:
        super().__init__(plan, batch)
        self.options = options
        self.float_ops: list[OpInFloat] = []
        self.inexact: list[str] = []

    def note_inexact(self, op: FusedOp) -> None:
        """Notes that the kernel of an op does not round ties as the graph does."""
        assert op.site is not None
        self.inexact.append(op.site.value.name)

    def result(self, node: TensorNode, order: Order, source: FileTensor | None = None) -> FileTensor:
        """Adds a tensor for the value of ``node``: integers if ``source`` is, else floats."""
        shape = file_shape(self.shape(node), order)
        if source is not None and source.grid is not None:
            return self.like(source, f"{node.name}_int", shape)
        kind = np.dtype(node.dtype) if source is None else source.dtype
        check_type(node.name, kind)
        return self.writer.tensor(node.name, shape, kind)

    def site_grid(self, op: FusedOp) -> tuple[str, np.dtype, Grid]:
        """Returns name, type and grid of the integers that ``op`` computes."""
        assert op.site is not None
        return f"{op.site.name}_int", integer_type(op.site), Grid.of(op.site.qparams)

    def target(self, op: FusedOp, order: Order, fuses: bool = True) -> Target:
        """Adds the output tensor of an operator: the integers of its site, floats without a site.

        Args:
            op: an op.
            order: the order of the result's axes.
            fuses: whether the operator can fuse an activation function.
        """
        if op.site is None:
            return Target(self.result(op.out, order), order, _number(op))
        name, kind, grid = self.site_grid(op)
        shape = file_shape(self.shape(op.out), order)
        if op.clamp is None or (bounds(op.clamp) in FUSED and fuses):
            return Target(self.writer.tensor(name, shape, kind, grid), order, _number(op))
        opened = self.writer.tensor(f"{op.call.out.name}_open", shape, kind, grid)
        return Target(opened, order, clamp=op.clamp)

    def finish(self, op: FusedOp, target: Target) -> None:
        """Makes ``target`` the result of ``op``, and adds the clamp that the operator did not fuse."""
        tensor = target.tensor
        if target.clamp is not None:
            tensor = self.clamped(tensor, bounds(target.clamp), self.site_grid(op)[0])
        self.put(op.out, tensor, target.order)

    def compute(
        self,
        op: FusedOp,
        order: Order,
        code: str,
        inputs: Inputs,
        fuses: bool = True,
        **options: Any,
    ) -> None:
        """Adds the operator of ``op``, which computes the integers of its site, or floats without a site."""
        target = self.target(op, order, fuses)
        if fuses:
            options["fusedActivationFunction"] = target.activation
        self.writer.op(code, inputs, [target.tensor], **options)
        self.finish(op, target)

    def emit(
        self,
        node: TensorNode,
        order: Order,
        code: str,
        inputs: Inputs,
        source: FileTensor | None = None,
        **options: Any,
    ) -> None:
        """Adds the operator that computes ``node``, in the type of ``source`` or else of the node."""
        out = self.result(node, order, source)
        self.writer.op(code, inputs, [out], **options)
        self.put(node, out, order)

    def clamped(self, tensor: FileTensor, limits: tuple[float | None, float | None], name: str) -> FileTensor:
        """Clamps integers on their own grid: clamping before or after rounding gives the same."""
        assert tensor.grid is not None
        info, steps = np.iinfo(tensor.dtype), []
        for code, limit, last in zip(("MAXIMUM", "MINIMUM"), limits, (info.min, info.max), strict=True):
            bound = last if limit is None else int(tensor.grid.integers(limit, tensor.dtype))
            if bound != last:  # beyond it, the type saturates
                steps.append((code, np.array(bound, tensor.dtype)))
        for number, (code, place) in enumerate(steps, 1):
            end = self.writer.constant(f"{name}_bound", place, tensor.grid)
            step = name if number == len(steps) else f"{name}_low"
            tensor = self.add(code, [tensor, end], step, tensor.shape, kind="MaximumMinimumOptions")
        return tensor

    def requantized(self, tensor: FileTensor, grid: Grid, name: str) -> FileTensor:
        """Rounds integers to another grid of the same type.

        Adds zero, since XNNPACK's QUANTIZE between integers has a multiplier of 8 bits, and is off by one in
        up to a tenth of the values. Its ADD has one of 20 bits.
        """
        result = self.writer.tensor(name, tensor.shape, tensor.dtype, grid)
        assert tensor.grid is not None
        zero = self.writer.constant("zero", np.array(tensor.grid.zero_point[0], tensor.dtype), tensor.grid)
        self.writer.op("ADD", [tensor, zero], [result])
        return result

    def quantized(self, tensor: FileTensor, grid: Grid, kind: np.dtype, name: str) -> FileTensor:
        """Rounds floats, or integers of another grid, to ``grid``."""
        if tensor.grid == grid and tensor.dtype == kind:
            return tensor
        if tensor.grid is not None and tensor.dtype == kind == np.int8:
            return self.requantized(tensor, grid, name)
        return self.writer.add("QUANTIZE", [tensor], name, tensor.shape, kind, grid)


Emitter = Callable[[Builder, FusedOp], None]


def check_type(name: str, kind: np.dtype) -> None:
    """Refuses the tensor ``name`` if files lack a type for it.

    Raises:
        ExportError: when files lack one.
    """
    if kind not in TYPES:
        raise ExportError(f"{name} is {kind.name}, which is not written to TFLite: use float32 or int32.")


def integer_type(site: QuantizedSite) -> np.dtype:
    """Returns the type of a site's integers in a file."""
    return np.dtype(np.int16 if site.qparams.scheme.bits == 16 else np.int8)


def allowing(kind: str) -> str:
    """Returns the advice how to let ops of ``kind`` compute in float."""
    return f"allow {kind} in float (allow_float={kind!r}, on the command line --allow-float {kind})"
