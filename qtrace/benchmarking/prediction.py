"""Predicts the time of an ONNX file in onnxruntime, from a cost table.

The file is not run. Each op is taken in the form in which onnxruntime computes it: integer kernels where all
that is read and written is rounded, float kernels elsewhere. What changes form or layout between them counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtrace.benchmarking.profile import FLOAT_OPS, INTEGER_OPS, LAYOUT, ROUNDINGS
from qtrace.costs import FLOAT, INTEGER, LOOKUP, PLAIN_MAX_POOL, STEM_CHANNELS, CostTable, OpShape, numel
from qtrace.onnxfile.external_data import read_model
from qtrace.onnxfile.local_session import stays_blocked

if TYPE_CHECKING:
    from qtrace.onnxfile.model import OnnxModel

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
    from onnx import TensorProto, helper

    timed = {TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT8}  # shape arithmetic takes no time

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
        elif node.op_type != "Constant" and kinds.get(outputs[0]) in timed:
            quantizes = node.op_type in ("QuantizeLinear", "DequantizeLinear")
            names = [n for n in (node.input[:1] if quantizes else node.input) if n]
            data = tuple(n for n in names if n not in stored and kinds.get(n) in timed)
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


_SORTS = {"quantize": ROUNDINGS, "dequantize": ROUNDINGS, "reorder": LAYOUT}
_CLAMPS = ("Relu", "Clip")
_WRITE_FLOATS = ("Gemm", "MatMul")
"""Ops whose integer kernels write floats where no rounding follows."""


@dataclass(frozen=True)
class PricedOp:
    """A node with its predicted time.

    Attributes:
        name: the name of its first output.
        kind: the kind, or ``quantize``, ``dequantize`` or ``reorder``.
        form: the form that it is computed in; "fused" for a part of the op before it.
        seconds: the predicted time; None if the table does not know the kind.
    """

    name: str
    kind: str
    form: str
    seconds: float | None


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a file.

    Attributes:
        ops: every node that takes time.
        per_run: the seconds of a run besides its nodes.
    """

    ops: tuple[PricedOp, ...]
    per_run: float

    @property
    def seconds(self) -> float:
        """The predicted time of a run."""
        return self.per_run + sum(op.seconds or 0.0 for op in self.ops)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The kinds that the table does not know."""
        return tuple(dict.fromkeys(op.kind for op in self.ops if op.seconds is None))

    def share(self, kinds: Iterable[str]) -> float:
        """Returns the share of the time that some kinds take."""
        selected = set(kinds)
        return sum(op.seconds or 0.0 for op in self.ops if op.kind in selected) / self.seconds

    def by_sort(self) -> dict[str, float]:
        """Returns the seconds of roundings, float kernels, layout changes and integer kernels."""
        seconds = dict.fromkeys((ROUNDINGS, FLOAT_OPS, LAYOUT, INTEGER_OPS), 0.0)
        for op in self.ops:
            kernel = INTEGER_OPS if op.form in (INTEGER, LOOKUP) else FLOAT_OPS
            seconds[_SORTS.get(op.kind, kernel)] += op.seconds or 0.0
        return seconds


def predict_float(graph: OnnxGraph, table: CostTable) -> Prediction:
    """Adds up the times of the ops of a file as if it had no roundings: all of them in float.

    Args:
        graph: the file, read by `read_graph`.
        table: the times of single ops.
    """
    return predict(graph.without_roundings(), table)


def predict(graph: OnnxGraph, table: CostTable) -> Prediction:
    """Adds up the times of the ops of a file.

    Args:
        graph: the file, read by `read_graph`.
        table: the times of single ops.
    """
    return Prediction(tuple(_Walk(graph, table).run()), table.per_run)


class _Walk:
    def __init__(self, graph: OnnxGraph, table: CostTable) -> None:
        self.graph, self.table = graph, table
        self.forms: dict[TimedNode, str] = {}
        self.layouts = LayoutChanges(graph)
        self.priced: list[PricedOp] = []
        self.gates: set[TimedNode] = set()
        self.gated: set[TimedNode] = set()

    def run(self) -> list[PricedOp]:
        """Returns all nodes with their times."""
        for node in self.graph.nodes:
            if node.op not in ("QuantizeLinear", "DequantizeLinear"):
                self.forms[node] = self._form(node)
        self._join_gates()
        for node in self.graph.nodes:
            if node.op == "QuantizeLinear":
                self._price_quantize(node)
            elif node.op == "DequantizeLinear":
                self._price_dequantize(node)
            else:
                self._price(node)
            if node in self.gates:
                continue
            for shape, form in self.layouts.enter(node, self.forms.get(node, ""), node in self.gated):
                self._add(node.name, OpShape("reorder", (shape,), (shape,)), form)
        for shape, form in self.layouts.leave():
            self._add("output", OpShape("reorder", (shape,), (shape,)), form)
        return self.priced

    def _join_gates(self) -> None:
        """Makes one op of x * sigmoid(x) in float, as onnxruntime does where no rounding stands between."""
        for node in self.graph.nodes:
            gates = [self.graph.producers.get(name) for name in node.data]
            for gate, other in zip(gates, reversed(node.data), strict=True):
                if node.op != "Mul" or gate is None or gate.op != "Sigmoid" or gate.data != (other,):
                    continue
                alone = len(self.graph.readers[gate.outputs[0]]) == 1
                if alone and not self._dequantized(other) and self.forms[node] == self.forms[gate] == FLOAT:
                    self.forms[gate] = "fused"
                    self.gates.add(gate)
                    self.gated.add(node)

    def _add(self, name: str, op: OpShape, form: str) -> None:
        self.priced.append(PricedOp(name, op.kind, form, self.table.seconds(op, form)))

    def _form(self, node: TimedNode) -> str:
        """Returns the form of an op: an integer one if all that it reads and gives is rounded."""
        op = self.graph.op_shape(node)
        before = self._producer(node)
        if self._fuses(node, before):
            return "fused"
        if op is not None and self._is_rounded_in_front(node):
            return INTEGER
        if op is None or not node.data or node.op == "InstanceNormalization":
            return FLOAT
        if not all(self._dequantized(name) for name in node.data):
            return FLOAT
        if not self._rounded(node) and node.op not in _WRITE_FLOATS:
            return FLOAT
        if not node.rounded and (op.stored or node.op in _WRITE_FLOATS):
            return FLOAT
        for form in (INTEGER, LOOKUP):
            if self.table.seconds(op, form) is not None:
                return form
        return FLOAT

    def _producer(self, node: TimedNode) -> TimedNode | None:
        return self.graph.producers.get(node.data[0]) if node.data else None

    def _fuses(self, node: TimedNode, before: TimedNode | None) -> bool:
        """Whether onnxruntime computes ``node`` inside the op before it."""
        if before is None or len(self.graph.readers[before.outputs[0]]) > 1:
            return False
        origin = before if self.forms.get(before) != "fused" else self._source(node)
        if origin is None or len(node.data) != 1:
            return False
        if self.forms.get(origin) in (INTEGER, LOOKUP):
            return node.op in _CLAMPS
        if origin.op == "Conv":
            folded = before.op not in _CLAMPS and self._folds(node)
            return node.op in _CLAMPS or folded
        return origin.op == "Add" and node.op == "Relu" and self._joins_conv(origin)

    def _folds(self, node: TimedNode) -> bool:
        """Whether a stored factor or summand becomes part of the convolution before it.

        It has to be the second operand: a factor without axes, or one number for each channel.
        """
        if node.op == "BatchNormalization":
            return True
        if node.op not in ("Mul", "Add") or not node.stored or node.stored_first:
            return False
        shape, channels = node.stored[0], self.graph.shapes.get(node.outputs[0], (0, 0))[1]
        return (shape == () and node.op == "Mul") or (channels,) == shape[-3:-2] == tuple(
            n for n in shape if n != 1
        )

    def _joins_conv(self, node: TimedNode) -> bool:
        """Whether a float sum is computed inside the convolution that gives one of its operands."""
        sources = [self.graph.producers.get(name) for name in node.data]
        return len(node.data) == 2 and any(
            s is not None and s.op == "Conv" and len(self.graph.readers[s.outputs[0]]) == 1 for s in sources
        )

    def _dequantized(self, name: str) -> bool:
        producer = self.graph.producers.get(name)
        return producer is not None and producer.op == "DequantizeLinear"

    def _rounded(self, node: TimedNode) -> bool:
        """Whether every reader rounds the result, after a clamp or at once."""
        for name in node.outputs:
            readers = self.graph.readers.get(name, [])
            if not readers or name in self.graph.outputs:
                return False
            for reader in readers:
                clamped = reader.op in _CLAMPS and len(readers) == 1 and self._rounded(reader)
                if reader.op != "QuantizeLinear" and not clamped:
                    return False
        return True

    def _price(self, node: TimedNode) -> None:
        form, op = self.forms[node], self.graph.op_shape(node)
        if node in self.gated:
            op = OpShape("silu", op.inputs[:1], op.outputs) if op is not None else None
        if op is not None and self._is_plain_pool(node):
            op = replace(op, kind=PLAIN_MAX_POOL)
        if self._is_rounded_in_front(node):
            self._add_rounding(node, "quantize", node.data[0])
        if form == "fused":
            self.priced.append(PricedOp(node.name, node.op, form, 0.0))
        elif op is None:
            self.priced.append(PricedOp(node.name, node.op, form, None))
        else:
            self._add(node.name, op, form)

    def _is_plain_pool(self, node: TimedNode) -> bool:
        """Whether a max pooling runs on integers in the plain layout."""
        return node.op == "MaxPool" and self.forms[node] == INTEGER and not self.layouts.is_last(node.data[0])

    def _is_rounded_in_front(self, node: TimedNode) -> bool:
        """Whether onnxruntime moves the rounding after a max pooling of floats before it."""
        if node.op != "MaxPool" or len(node.data) != 1 or self._dequantized(node.data[0]):
            return False
        behind = [reader for name in node.outputs for reader in self.graph.readers.get(name, [])]
        alone = len(behind) == len(self.graph.readers[node.data[0]]) == 1
        return alone and behind[0].op == "QuantizeLinear" and node.outputs[0] not in self.graph.outputs

    def _price_quantize(self, node: TimedNode) -> None:
        """Adds the time of a rounding that no integer kernel does itself."""
        before = self._source(node)
        if before is None or self.forms.get(before) not in (INTEGER, LOOKUP):
            self._add_rounding(node, "quantize", node.data[0])

    def _source(self, node: TimedNode) -> TimedNode | None:
        """Returns the op that computes what a node rounds, before a clamp that is part of it."""
        before = self._producer(node)
        while before is not None and self.forms.get(before) == "fused":
            before = self._producer(before)
        return before

    def _price_dequantize(self, node: TimedNode) -> None:
        """Adds the time for each reader that computes in float: onnxruntime copies the node for each."""
        name = node.outputs[0]
        floats = [r for r in self.graph.readers.get(name, []) if self.forms.get(r) not in (INTEGER, LOOKUP)]
        for _ in range(len(floats) + (name in self.graph.outputs)):
            self._add_rounding(node, "dequantize", name)

    def _add_rounding(self, node: TimedNode, kind: str, name: str) -> None:
        shape = self.graph.shapes.get(name)
        if shape is None:
            self.priced.append(PricedOp(node.name, kind, FLOAT, None))
        else:
            self._add(node.name, OpShape(kind, (shape,), (shape,)), FLOAT)
