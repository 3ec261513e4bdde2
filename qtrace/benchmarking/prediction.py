"""Predicts the time of an ONNX file in onnxruntime, from a cost table.

The file is not run. Each op is taken in the form in which onnxruntime computes it: integer kernels where all
that is read and written is rounded, float kernels elsewhere. What changes form or layout between them counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from qtrace.benchmarking.onnx_ops import LayoutChanges, OnnxGraph, TimedNode
from qtrace.benchmarking.profile import FLOAT_OPS, INTEGER_OPS, LAYOUT, ROUNDINGS
from qtrace.costs import FLOAT, INTEGER, LOOKUP, PLAIN_MAX_POOL, CostTable, OpShape

__all__ = ["Prediction", "PricedOp", "predict", "predict_float"]

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
