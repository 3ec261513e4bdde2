"""A quantized ONNX file as a graph, and the grids of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from onnx import NodeProto, TensorProto, helper

from qtrace.onnxfile.model import OnnxEditor, read_names


def type_name(kind: int) -> str:
    """Returns the name of a type of ONNX, such as ``uint8``."""
    return str(TensorProto.DataType.Name(kind)).lower()


@dataclass(frozen=True, eq=False)
class IntegerGrid:
    """The integers ``q`` that stand for ``(q - zero_point) * scale``.

    Attributes:
        scale: float64, of shape ``()`` per tensor or ``(C,)`` per channel.
        zero_point: int64, of the same shape.
        type: the type of the integers, a number of `onnx.TensorProto`.
        axis: the axis of the channels; without effect per tensor.
    """

    scale: np.ndarray
    zero_point: np.ndarray
    type: int
    axis: int = 0

    BOUNDS: ClassVar[dict[int, tuple[int, int]]] = {
        TensorProto.INT4: (-8, 7),
        TensorProto.UINT4: (0, 15),
        TensorProto.INT8: (-128, 127),
        TensorProto.UINT8: (0, 255),
        TensorProto.INT16: (-32768, 32767),
        TensorProto.UINT16: (0, 65535),
        TensorProto.INT32: (-(2**31), 2**31 - 1),
    }

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The real values of the lowest and the highest integer."""
        low, high = self.BOUNDS[self.type]
        return (low - self.zero_point) * self.scale, (high - self.zero_point) * self.scale

    def fits(self, values: np.ndarray) -> bool:
        """Whether there is a scale for each channel of ``values``, or one for all."""
        if self.scale.size == 1:
            return True
        return -values.ndim <= self.axis < values.ndim and values.shape[self.axis] == self.scale.size

    def quantize(self, values: np.ndarray) -> np.ndarray:
        """Rounds values half to even, as ONNX does; returns int64."""
        scale, zero_point = self._spread(values)
        return np.clip(np.rint(values / scale) + zero_point, *self.BOUNDS[self.type]).astype(np.int64)

    def dequantize(self, integers: np.ndarray) -> np.ndarray:
        """Returns the values of integers in float32."""
        scale, zero_point = self._spread(integers)
        return ((integers.astype(np.int64) - zero_point) * scale).astype(np.float32)

    def stored(self, integers: np.ndarray) -> np.ndarray:
        """Returns integers in the type of the grid."""
        return integers.astype(helper.tensor_dtype_to_np_dtype(self.type))

    def _spread(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns scale and zero point in shapes that fit ``values``."""
        if self.scale.size == 1:
            return self.scale.reshape(()), self.zero_point.reshape(())
        shape = [1] * values.ndim
        shape[self.axis] = -1
        return self.scale.reshape(shape), self.zero_point.reshape(shape)


def symmetric(values: np.ndarray, kind: int, axis: int | None) -> IntegerGrid:
    """Returns the symmetric grid that covers constant values, as weights have it.

    Args:
        values: the values.
        kind: the type of the integers, a signed one.
        axis: the axis of the channels, each of which gets a scale; None for one scale.
    """
    high = IntegerGrid.BOUNDS[kind][1]
    magnitude = np.abs(values.astype(np.float64))
    if axis is None:
        largest = magnitude.max(initial=0.0)
    else:
        largest = np.moveaxis(magnitude, axis, 0).reshape(values.shape[axis], -1).max(axis=1, initial=0.0)
    scale = np.asarray(np.where(largest > 0, largest / high, 1.0)).astype(np.float32).astype(np.float64)
    zero_point = np.zeros(scale.shape, np.int64)
    return IntegerGrid(scale, zero_point, kind, 0 if axis is None else axis % values.ndim)


def bias_grid(data: IntegerGrid, weight: IntegerGrid) -> IntegerGrid:
    """Returns the int32 grid of a bias: at the product of the scales of a layer's input and its weight."""
    scale = np.float32(data.scale.reshape(())) * weight.scale.astype(np.float32)
    scale = np.asarray(scale, np.float64)
    return IntegerGrid(scale, np.zeros(scale.shape, np.int64), TensorProto.INT32, 0)


QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")

_GATES = ("Sigmoid", "HardSigmoid", "HardSwish", "Tanh")
FUNCTIONS = ("Relu", "Clip", "LeakyRelu", "PRelu", "Elu", "Mish", *_GATES)
"""Activation functions of one input."""

_KEEPS_SIGN = ("MaxPool", "AveragePool", "GlobalAveragePool", "Flatten", "Reshape", "Transpose")
_NOT_NEGATIVE = ("Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs")

LAYERS = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2, "MatMul": None}
"""Op with a weight as its second input -> the position of its bias; None without one."""


def attribute(node: NodeProto, name: str, default: int) -> int:
    """Returns an integer attribute of ``node``."""
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def label(node: NodeProto) -> str:
    """Names a node: by its type and its name, or its first output if it is unnamed."""
    return f"{node.op_type} {node.name or next(iter(node.output), '')}"


def channel_axis(node: NodeProto) -> int:
    """Returns the axis of a layer's weight that counts output channels."""
    if node.op_type == "Gemm":
        return 0 if attribute(node, "transB", 0) else 1
    return {"Conv": 0, "ConvTranspose": 1}.get(node.op_type, -1)


@dataclass(frozen=True, eq=False)
class Quantizer:
    """A QuantizeLinear or DequantizeLinear node.

    Attributes:
        node: the node.
        scale: its scales; None if they are computed.
        zero_point: its zero points; None if there are none, or if they are computed.
        type: the type of its integers, a number of `onnx.TensorProto`.
    """

    node: NodeProto
    scale: np.ndarray | None
    zero_point: np.ndarray | None
    type: int

    @property
    def has_zero_point(self) -> bool:
        """Whether the node names a zero point."""
        return len(self.node.input) > 2 and bool(self.node.input[2])

    @property
    def axis(self) -> int:
        """The axis of the channels, as the node says it."""
        return attribute(self.node, "axis", 1)

    @property
    def per_channel(self) -> bool:
        """Whether there are several scales."""
        return self.scale is not None and self.scale.size > 1

    @property
    def grid(self) -> IntegerGrid | None:
        """The grid of the integers; None if it is not constant or not valid."""
        if self.scale is None or (self.has_zero_point and self.zero_point is None):
            return None
        zero_point = np.zeros(self.scale.shape, np.int64) if self.zero_point is None else self.zero_point
        if zero_point.size not in (1, self.scale.size) or self.type not in IntegerGrid.BOUNDS:
            return None
        if not self.scale.size or not (np.isfinite(self.scale).all() and (self.scale > 0).all()):
            return None
        zero_point = np.broadcast_to(zero_point.reshape(-1), self.scale.size).reshape(self.scale.shape)
        return IntegerGrid(self.scale.astype(np.float64), zero_point.astype(np.int64), self.type, self.axis)


@dataclass(frozen=True, eq=False)
class Operand:
    """What a node reads at one input.

    Attributes:
        name: the tensor.
        dequantize: the DequantizeLinear that gives it; None for floats.
        quantize: the QuantizeLinear before that; None for stored integers and for floats.
        values: the values of a constant, dequantized; None for a computed tensor.
    """

    name: str
    dequantize: Quantizer | None
    quantize: Quantizer | None
    values: np.ndarray | None


class QdqGraph(OnnxEditor):
    """Reads the roundings of a model, and changes it in place.

    Args:
        model: an ONNX model with its tensors loaded.
    """

    # -- reading ------------------------------------------------------------------------------------

    def type_of(self, name: str) -> int:
        """Returns the type of a tensor of integers, where its node or its storage tells; 0 if not."""
        if name in self.stored:
            return self.stored[name].data_type
        producer = self.producers.get(name)
        if producer is not None and producer.op_type == "QuantizeLinear":
            return self.quantizer(producer).type
        return 0

    def quantizer(self, node: NodeProto) -> Quantizer:
        """Reads a QuantizeLinear or DequantizeLinear."""
        named = len(node.input) > 2 and bool(node.input[2])
        kind = self.stored[node.input[2]].data_type if named and node.input[2] in self.stored else 0
        if not kind and node.op_type == "DequantizeLinear":
            kind = self.type_of(node.input[0])
        kind = kind or attribute(node, "output_dtype", 0) or TensorProto.UINT8
        zero_point = self.value(node.input[2]) if named else None
        scale = self.value(node.input[1]) if len(node.input) > 1 else None
        return Quantizer(node, scale, zero_point, kind)

    def quantizers(self) -> Iterator[Quantizer]:
        """Yields all QuantizeLinear and DequantizeLinear nodes."""
        return (self.quantizer(node) for node in self.nodes(*QUANTIZERS))

    def is_stored(self, quantizer: Quantizer) -> bool:
        """Whether a quantizer is one of a constant: a weight or a bias."""
        node = quantizer.node
        producer = self.producers.get(node.input[0])
        if node.op_type == "DequantizeLinear" and producer is not None:
            return producer.op_type == "QuantizeLinear" and producer.input[0] in self.stored
        return node.input[0] in self.stored

    def operand(self, node: NodeProto, index: int) -> Operand | None:
        """Returns what ``node`` reads at an input; None if there is no such input."""
        if index >= len(node.input) or not node.input[index]:
            return None
        name = node.input[index]
        producer = self.producers.get(name)
        if producer is None or producer.op_type != "DequantizeLinear":
            return Operand(name, None, None, self.value(name))
        dequantize = self.quantizer(producer)
        before = self.producers.get(producer.input[0])
        quantize = (
            self.quantizer(before) if before is not None and before.op_type == "QuantizeLinear" else None
        )
        return Operand(name, dequantize, quantize, self._dequantized(dequantize, quantize))

    def _dequantized(self, dequantize: Quantizer, quantize: Quantizer | None) -> np.ndarray | None:
        """Computes the value of a constant after its quantizers."""
        source = (quantize or dequantize).node.input[0]
        value, grid = self.value(source), dequantize.grid
        if value is None or grid is None or not grid.fits(value):
            return None
        if quantize is not None:
            if quantize.grid is None or not quantize.grid.fits(value):
                return None
            value = quantize.grid.quantize(value)
        return grid.dequantize(value)

    def layers(self) -> Iterator[tuple[NodeProto, Operand, Operand]]:
        """Yields each layer with its input and its weight; products of two computed tensors are none."""
        for node in self.nodes(*LAYERS):
            data, weight = self.operand(node, 0), self.operand(node, 1)
            if data is None or weight is None or weight.values is None:
                continue
            if -weight.values.ndim <= channel_axis(node) < weight.values.ndim:
                yield node, data, weight

    def only_reader(self, name: str) -> NodeProto | None:
        """Returns the only node that reads a tensor, if the graph does not return it."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self.output_names else None

    def partners(self, quantizer: Quantizer) -> list[NodeProto] | None:
        """Returns the QuantizeLinear of a tensor and every node that reads its integers.

        A stored tensor is without a QuantizeLinear. None if another node than a DequantizeLinear reads the
        integers: then their parameters are not to be changed.
        """
        node = quantizer.node
        producer = node if node.op_type == "QuantizeLinear" else self.producers.get(node.input[0])
        if producer is None or producer.op_type != "QuantizeLinear":
            return [node] if node.input[0] in self.stored else None
        integers = producer.output[0]
        readers = self.readers.get(integers, [])
        if integers in self.output_names or any(r.op_type != "DequantizeLinear" for r in readers):
            return None
        return [producer, *readers]

    # -- changing -----------------------------------------------------------------------------------

    def set_grid(self, nodes: list[NodeProto], grid: IntegerGrid) -> None:
        """Gives quantizers the scale, zero point, type and axis of ``grid``.

        Tools leave a Relu out whose result is rounded to integers that begin at 0. If those in ``grid`` begin
        below, the Relu is written.
        """
        self._keep_clamp(nodes[0], grid)
        scale = self.store(nodes[0].input[1], grid.scale.astype(np.float32))
        zero_point = self.store(f"{nodes[0].input[1]}_zero_point", grid.stored(grid.zero_point))
        for node in nodes:
            del node.input[1:]
            node.input.extend([scale, zero_point])
            for own in [a for a in node.attribute if a.name in ("axis", "output_dtype")]:
                node.attribute.remove(own)
            if grid.scale.ndim:
                node.attribute.append(helper.make_attribute("axis", grid.axis))
        self.refresh()

    def _keep_clamp(self, node: NodeProto, grid: IntegerGrid) -> None:
        """Writes a Relu before ``node`` if only the integers of ``grid`` stand for negative values."""
        before = self.quantizer(node).grid if node.op_type == "QuantizeLinear" else None
        if before is None or before.ends[0].min() < 0 or grid.ends[0].min() >= 0:
            return
        source = self.producers.get(node.input[0])
        while source is not None and source.op_type in (*_KEEPS_SIGN, *QUANTIZERS):
            source = self.producers.get(source.input[0])
        if source is not None and source.op_type in _NOT_NEGATIVE:
            return
        self._read(node, 0, "Relu", [node.input[0]], f"{node.output[0]}_clamped")

    def set_stored(self, node: NodeProto, index: int, values: np.ndarray, grid: IntegerGrid) -> None:
        """Makes the operand of a layer the integers of ``values`` on ``grid``, before a DequantizeLinear."""
        base = node.input[index] if index < len(node.input) else f"{node.output[0]}_{index}"
        integers = self.store(f"{base}_int", grid.stored(grid.quantize(values)))
        scale = self.store(f"{base}_scale", grid.scale.astype(np.float32))
        zero_point = self.store(f"{base}_zero_point", grid.stored(grid.zero_point))
        extra: dict[str, Any] = {"axis": grid.axis} if grid.scale.ndim else {}
        inputs = [integers, scale, zero_point]
        self._read(node, index, "DequantizeLinear", inputs, f"{integers}_dequantized", **extra)

    def _read(
        self, node: NodeProto, index: int, op: str, inputs: list[str], name: str, **attributes: Any
    ) -> None:
        """Lets an input of ``node`` read the result of a new node before it."""
        output = self.fresh(name)
        self.replace(node, helper.make_node(op, inputs, [output], name=output, **attributes), node)
        self.connect(node, index, output)

    def connect(self, node: NodeProto, index: int, name: str) -> None:
        """Lets an input of ``node`` read another tensor."""
        while len(node.input) <= index:
            node.input.append("")
        node.input[index] = name
        self.refresh()

    def finish(self) -> None:
        """Sorts the nodes, removes quantizers and constants that nobody reads, and writes the nodes."""
        ready = {*(value.name for value in self.graph.input), *(t.name for t in self.graph.initializer)}
        waiting, ordered = self.nodes(), list[NodeProto]()
        while waiting:
            later = []
            for node in waiting:
                # Tensors that an outer graph gives lack a producer here.
                if all(name in ready or name not in self.producers for name in read_names(node)):
                    ordered.append(node)
                    ready.update(node.output)
                else:
                    later.append(node)
            if len(later) == len(waiting):  # a cycle, which was there before
                ordered, later = ordered + later, []
            waiting = later
        self.set_nodes(ordered)
        self.drop_unread(*QUANTIZERS, "Constant")
        super().finish()
