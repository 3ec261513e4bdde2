"""What builds a file: its options and the operands of operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.detections import Suppression
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite
from qtrace.targets.tflite.layout import FUSED, FusedOp, KernelPlan, Order, bounds, file_shape, natural
from qtrace.targets.tflite.store import OrderedTensor, Store
from qtrace.targets.tflite.writer import TYPES, FileTensor, Grid, Inputs

__all__ = [
    "BuildOptions",
    "Builder",
    "Emitter",
    "OpInFloat",
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
    b.writer.op("CAST", [tensor], [result], "CastOptions")
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


_NONE = 0  # the schema's number of no activation function


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
    activation: int = _NONE
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
            return Target(self.result(op.out, order), order, FUSED[bounds(op.clamp)] if op.clamp else _NONE)
        name, kind, grid = self.site_grid(op)
        shape = file_shape(self.shape(op.out), order)
        number = _NONE if op.clamp is None else FUSED.get(bounds(op.clamp))
        if op.clamp is None or (number is not None and fuses):
            return Target(self.writer.tensor(name, shape, kind, grid), order, number or _NONE)
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
        kind: str,
        fuses: bool = True,
        **options: Any,
    ) -> None:
        """Adds the operator of ``op``, which computes the integers of its site, or floats without a site."""
        target = self.target(op, order, fuses)
        if fuses:
            options["fusedActivationFunction"] = target.activation
        self.writer.op(code, inputs, [target.tensor], kind, **options)
        self.finish(op, target)

    def emit(
        self,
        node: TensorNode,
        order: Order,
        code: str,
        inputs: Inputs,
        kind: str = "",
        source: FileTensor | None = None,
        **options: Any,
    ) -> None:
        """Adds the operator that computes ``node``, in the type of ``source`` or else of the node."""
        out = self.result(node, order, source)
        self.writer.op(code, inputs, [out], kind, **options)
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
        self.writer.op("ADD", [tensor, zero], [result], "AddOptions")
        return result

    def quantized(self, tensor: FileTensor, grid: Grid, kind: np.dtype, name: str) -> FileTensor:
        """Rounds floats, or integers of another grid, to ``grid``."""
        if tensor.grid == grid and tensor.dtype == kind:
            return tensor
        if tensor.grid is not None and tensor.dtype == kind == np.int8:
            return self.requantized(tensor, grid, name)
        return self.writer.add("QUANTIZE", [tensor], name, tensor.shape, kind, grid, kind="QuantizeOptions")


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
