"""An ONNX file as the ops of a cost table, and where onnxruntime changes the layout of a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtrace.costs import FLOAT, INTEGER, LOOKUP, OpShape
from qtrace.costs.table import numel
from qtrace.onnxfile.external_data import read_model
from qtrace.onnxfile.local_session import STEM_CHANNELS, stays_blocked

if TYPE_CHECKING:
    from qtrace.onnxfile.model import OnnxModel

__all__ = ["LayoutChanges", "OnnxGraph", "TimedNode", "read_graph"]

KINDS = {
    "Add": "add",
    "AveragePool": "avg_pool2d",
    "BatchNormalization": "scale_and_shift",
    "Clip": "clip",
    "Concat": "concat",
    "Conv": "conv2d",
    "ConvTranspose": "conv_transpose2d",
    "Div": "div",
    "Elu": "exp",
    "Erf": "exp",
    "Exp": "exp",
    "Gemm": "linear",
    "GlobalAveragePool": "adaptive_avg_pool2d",
    "HardSigmoid": "hsigmoid",
    "HardSwish": "hswish",
    "InstanceNormalization": "softmax",  # three passes over each row, too
    "LayerNormalization": "layer_norm",
    "LeakyRelu": "leaky_relu",
    "Log": "exp",
    "LogSoftmax": "softmax",
    "MatMul": "matmul",
    "Max": "maximum",
    "MaxPool": "max_pool2d",
    "Min": "minimum",
    "Mul": "mul",
    "PRelu": "leaky_relu",
    "Pow": "pow",
    "ReduceMax": "mean",
    "ReduceMean": "mean",
    "ReduceSum": "mean",
    "Relu": "relu",
    "Resize": "interpolate",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Softplus": "exp",
    "Sqrt": "relu",
    "Sub": "sub",
    "Tanh": "tanh",
    "Transpose": "transpose",
    **dict.fromkeys(("Abs", "Neg", "Floor", "Ceil", "Round", "Sign"), "relu"),
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), "reshape"),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), "transpose"),
    **dict.fromkeys(("Expand", "Gather", "Pad", "Slice", "Split", "Tile", "Where"), "split"),
}
"""ONNX op -> the kind of a cost table that computes the same."""

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TimedNode:
    """A node that computes floats, QuantizeLinear or DequantizeLinear.

    Attributes:
        name: the name of its first output.
        op: its ONNX op.
        data: the computed tensors that it reads.
        stored: the shapes of the stored tensors that it reads, dequantized ones included.
        outputs: its outputs.
        stored_first: whether its first operand is stored.
        rounded: whether the stored tensors are integers that a DequantizeLinear reads.
        attributes: its attributes.
    """

    name: str
    op: str
    data: tuple[str, ...]
    stored: tuple[Shape, ...]
    outputs: tuple[str, ...]
    stored_first: bool = False
    rounded: bool = True
    attributes: Mapping[str, Any] = field(default_factory=dict)


class OnnxGraph:
    """The nodes of a file that take time.

    Args:
        nodes: the nodes, in order.
        shapes: tensor -> shape.
        inputs: the names of the inputs.
        outputs: the names of the outputs.
    """

    def __init__(
        self,
        nodes: list[TimedNode],
        shapes: Mapping[str, Shape],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
    ) -> None:
        self.nodes, self.shapes, self.inputs, self.outputs = nodes, shapes, inputs, outputs

    @cached_property
    def producers(self) -> dict[str, TimedNode]:
        """Tensor -> the node that computes it."""
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def readers(self) -> dict[str, list[TimedNode]]:
        """Tensor -> the nodes that read it."""
        readers: dict[str, list[TimedNode]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.data):
                readers.setdefault(name, []).append(node)
        return readers

    def without_roundings(self) -> OnnxGraph:
        """Returns the graph without QuantizeLinear and DequantizeLinear; their readers read their data."""
        sources: dict[str, str] = {}
        nodes = []
        for node in self.nodes:
            data = tuple(sources.get(name, name) for name in node.data)
            if node.op in ("QuantizeLinear", "DequantizeLinear"):
                sources.update(dict.fromkeys(node.outputs, data[0]))
            else:
                nodes.append(replace(node, data=data))
        outputs = tuple(sources.get(name, name) for name in self.outputs)
        return OnnxGraph(nodes, self.shapes, self.inputs, outputs)

    def op_shape(self, node: TimedNode) -> OpShape | None:
        """Returns the shapes of a node; None if its kind or a shape is unknown."""
        kind = KINDS.get(node.op)
        names = (*node.data, *node.outputs)
        if kind is None or any(name not in self.shapes for name in names):
            return None
        inputs = tuple(self.shapes[name] for name in node.data)
        outputs = tuple(self.shapes[name] for name in node.outputs)
        stride = tuple(node.attributes.get("strides", ()))
        if node.op == "InstanceNormalization":
            rows = inputs[0][0] * inputs[0][1]
            shape = (rows, numel(inputs[0]) // max(rows, 1))
            return OpShape(kind, (shape,), (shape,))
        if kind in ("conv2d", "conv_transpose2d") and node.stored:
            groups = node.attributes.get("group", 1)
            return OpShape(kind, inputs, outputs, weight=node.stored[0], stride=stride, groups=groups)
        if kind in ("linear", "matmul"):
            weight = node.stored[0] if node.stored else ()
            return OpShape("linear" if weight else "matmul", inputs, outputs, weight=weight)
        if kind in ("max_pool2d", "avg_pool2d"):
            return OpShape(
                kind, inputs, outputs, weight=tuple(node.attributes["kernel_shape"]), stride=stride
            )
        if kind == "interpolate" and node.attributes.get("mode") != "nearest":
            kind = "interpolate, bilinear"
        stored = bool(node.stored) and node.op in ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min")
        return OpShape(kind, (*inputs, *node.stored[:1]) if stored else inputs, outputs, stored=stored)


def read_graph(path: Path, shapes: Mapping[str, Shape] | None = None) -> OnnxGraph:
    """Reads the nodes of an ONNX file that take time.

    Args:
        path: the file.
        shapes: input -> shape, for inputs whose sizes the file leaves open; 1 for a batch without.

    Raises:
        ExportError: when the file is no ONNX file.
    """
    model = read_model(path)
    from qtrace.onnxfile.model import infer_shapes

    return _graph(infer_shapes(model, shapes or {}, path))


def _graph(file: OnnxModel) -> OnnxGraph:
    from onnx import helper

    stored = {name: tuple(tensor.dims) for name, tensor in file.stored.items()}
    infos = (*file.graph.input, *file.outputs, *file.graph.value_info)
    kinds = {i.name: i.type.tensor_type.elem_type for i in infos}
    shapes = file.shapes()
    nodes: list[TimedNode] = []
    rounded: set[str] = set()
    for node in file.graph.node:
        outputs = tuple(name for name in node.output if name)
        if node.op_type in _FOLDED and node.input[0] in stored and outputs[0] in shapes:
            stored[outputs[0]] = shapes[outputs[0]]  # a runtime computes it once, when it loads the file
            rounded.update(outputs[:1] if node.input[0] in rounded else ())
            continue
        if node.op_type == "DequantizeLinear" and node.input[0] in stored:
            stored[outputs[0]] = stored[node.input[0]]
            rounded.add(outputs[0])
        elif node.op_type != "Constant" and kinds.get(outputs[0]) in _TIMED:
            quantizes = node.op_type in ("QuantizeLinear", "DequantizeLinear")
            names = [n for n in (node.input[:1] if quantizes else node.input) if n]
            data = tuple(n for n in names if n not in stored and kinds.get(n) in _TIMED)
            constants = tuple(stored[n] for n in names if n in stored)
            integers = all(n in rounded for n in names if n in stored)
            attributes = {a.name: _plain(helper.get_attribute_value(a)) for a in node.attribute}
            first = bool(names) and names[0] in stored
            nodes.append(
                TimedNode(outputs[0], node.op_type, data, constants, outputs, first, integers, attributes)
            )
    inputs = tuple(value.name for value in file.inputs)
    return OnnxGraph(nodes, shapes, inputs, tuple(file.output_names))


_FOLDED = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Transpose", "Cast")
_TIMED = (1, 2, 3)  # float32, uint8, int8: shape arithmetic takes no time


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


PLAIN, BLOCKED, LAST = "plain", "blocked", "channels last"

_SENSITIVE = (
    "Reshape Flatten Squeeze Unsqueeze MatMul Gemm Softmax ConvTranspose LayerNormalization Transpose"
)

Change = tuple[tuple[int, ...], str]


class LayoutChanges:
    """Follows the layout of every tensor through a graph, node by node."""

    def __init__(self, graph: OnnxGraph) -> None:
        self._graph = graph
        self._layouts = {name: {PLAIN} for name in graph.inputs}

    def is_last(self, name: str) -> bool:
        """Returns whether a tensor of a node before has the channels last."""
        return LAST in self._layouts.get(name, ())

    def enter(self, node: TimedNode, form: str, gated: bool = False) -> Iterator[Change]:
        """Yields the changes before a node, as the shape and the form of a ``reorder``.

        Args:
            node: the next node of the graph.
            form: the form that it is computed in.
            gated: whether it is the end of x * sigmoid(x), which lacks a kernel for blocks.
        """
        sources = [self._layouts.get(name, {PLAIN}) for name in node.data]
        layout = PLAIN if gated else self._layout(node, form, sources)
        for name, has in zip(node.data, sources, strict=True):
            shape = self._graph.shapes.get(name, ())
            needed = PLAIN if self._is_stem(node, layout, shape) else layout
            if needed not in has and len(shape) == 4:
                has.add(needed)
                yield from _changes(has, shape, needed)
        for name in node.outputs:
            self._layouts[name] = {layout}

    def leave(self) -> Iterator[Change]:
        """Yields the changes before the outputs of the graph."""
        for name in self._graph.outputs:
            has, shape = self._layouts.get(name, {PLAIN}), self._graph.shapes.get(name, ())
            if PLAIN not in has and len(shape) == 4:
                yield from _changes(has, shape, PLAIN)

    @staticmethod
    def _is_stem(node: TimedNode, layout: str, shape: tuple[int, ...]) -> bool:
        return node.op == "Conv" and layout == BLOCKED and len(shape) == 4 and shape[1] < STEM_CHANNELS

    def _layout(self, node: TimedNode, form: str, sources: list[set[str]]) -> str:
        if node.op == "Conv":
            return LAST if form in (INTEGER, LOOKUP) else BLOCKED
        has = set().union(*sources) if sources else {PLAIN}
        if node.op in _SENSITIVE.split() or not has - {PLAIN}:
            return PLAIN
        if LAST in has:
            return LAST
        return BLOCKED if form == "fused" or self._stays_blocked(node, sources) else PLAIN

    def _stays_blocked(self, node: TimedNode, sources: list[set[str]]) -> bool:
        """Whether a float op has a kernel for blocks: if all that it reads is in blocks of one shape."""
        producer = self._graph.producers.get(node.data[0])
        after_conv = producer is not None and producer.op == "Conv"
        shapes = {self._graph.shapes.get(name) for name in node.data}
        return stays_blocked(
            node.op,
            blocked=all(BLOCKED in has for has in sources),
            after_conv=after_conv and len(self._graph.readers[node.data[0]]) == 1,
            equal_shapes=len(shapes) == 1 and not node.stored,
        )


def _changes(has: set[str], shape: tuple[int, ...], needed: str) -> Iterator[Change]:
    """Yields one change for each step between the layouts that a tensor has and the one that is needed."""
    if LAST in has or needed == LAST:
        yield shape, INTEGER
    if (BLOCKED in has and needed == PLAIN) or needed == BLOCKED or (BLOCKED in has and needed == LAST):
        yield shape, FLOAT
