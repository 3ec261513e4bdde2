"""A converted graph as plain data for documents: ops without fake quants, tensors with their quantization."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qtrace.export.converted.graph import ConvertedGraph
from qtrace.graph.types import Constant, Expr, GetAttr, ModuleNode, Node
from qtrace.graph.walk import op_label
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite

__all__ = ["DocumentOp", "GraphDocument", "TensorQuantization", "Value", "read_graph"]


@dataclass(frozen=True)
class TensorQuantization:
    """The quantization of a tensor: ``x = (q - zero_point) * scale``.

    Attributes:
        site: the site, or the node that carries a site's integers.
        scheme: the scheme in words.
        scale: one scale, or one per channel.
        zero_point: one zero point per entry of ``scale``.
    """

    site: str
    scheme: str
    scale: np.ndarray
    zero_point: np.ndarray


@dataclass(frozen=True)
class Value:
    """A tensor that an op reads or computes.

    Attributes:
        name: the name of the node.
        producer: the name of the op that computes it; "" for a parameter.
        index: the tensor's position among the outputs of the producer.
        shape: the traced shape.
        dtype: the type in the graph, where quantized tensors are floats.
        quantized: the quantization; None for a float tensor.
    """

    name: str
    producer: str
    index: int
    shape: tuple[int, ...]
    dtype: str
    quantized: TensorQuantization | None


@dataclass(frozen=True)
class DocumentOp:
    """One op of a document.

    Attributes:
        name: the name of the first output.
        kind: the op kind, "" without a rule.
        label: the function or module that it calls.
        inputs: the tensors that it reads, without weight and bias.
        outputs: the tensors that it computes.
        weights: "weight" and "bias" of a layer, "const" of a constant.
        attrs: the constant arguments.
    """

    name: str
    kind: str
    label: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: dict[str, Value] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphDocument:
    """A graph as plain data.

    Attributes:
        name: the name of the graph.
        backend: the backend that it was prepared for.
        ops: all ops in order, with ops of kind ``input`` and ``constant``.
        outputs: the outputs of the graph.
        parameters: name of a weight or constant -> its value, where it is stored and not computed.
    """

    name: str
    backend: str
    ops: tuple[DocumentOp, ...]
    outputs: tuple[Value, ...]
    parameters: dict[str, np.ndarray] = field(default_factory=dict)


def read_graph(converted: ConvertedGraph) -> GraphDocument:
    """Reads a converted graph as plain data."""
    return _DocumentReader(converted).graph()


class _DocumentReader:
    def __init__(self, converted: ConvertedGraph) -> None:
        self.converted = converted
        # Node -> its site, for nodes that are rounded for all readers.
        self.results = {s.node: s for s in self.converted.sites if s.decision.consumers is None}
        self.producers: dict[Node, tuple[str, int]] = {}
        self.constants: set[Node] = set()
        self.parameters: dict[str, np.ndarray] = {}

    def graph(self) -> GraphDocument:
        """Returns the graph."""
        converted, document_ops = self.converted, []
        for node, name in converted.inputs.items():
            self.producers[node] = (name, 0)
            document_ops.append(DocumentOp(name, "input", "input", (), (self._value(node),)))
        for op in converted.ops:
            document_ops += self._op(op.expr, op.call)
        for node in converted.outputs:
            document_ops += self._constant(node)
        outputs = tuple(self._value(n) for n in converted.outputs)
        name = converted.module.graph.name or "qtrace"
        backend = converted.annotation.backend
        return GraphDocument(name, backend, tuple(document_ops), outputs, self.parameters)

    def _op(self, expr: Expr, call: OpCall | None) -> Iterator[DocumentOp]:
        """Yields the op of an expr, after the constants that it is the first to read."""
        weights = {} if call is None else {"weight": call.weight, "bias": call.bias}
        layer = {n for n in weights.values() if n is not None}
        read = [n for n in expr.inputs if not isinstance(n, ModuleNode) and n not in layer]
        for node in read:
            yield from self._constant(node)
        name = expr.outputs[0].name
        self.producers.update((n, (name, i)) for i, n in enumerate(expr.outputs))
        yield DocumentOp(
            name,
            "" if call is None else call.kind,
            op_label(expr),
            tuple(self._value(n) for n in read),
            tuple(self._result(n) for n in expr.outputs),
            {key: self._parameter(n) for key, n in weights.items() if n is not None},
            {} if call is None else {k: v for k, v in call.attrs.items() if _plain(v)},
        )

    def _constant(self, node: Node) -> Iterator[DocumentOp]:
        """Yields the op of a constant when it is first read or returned."""
        site = self.converted.site_of(node)
        source = node if site is None else site.node
        if isinstance(source.expr, (GetAttr, Constant)) and source not in self.constants:
            self.constants.add(source)
            self.producers[source] = (source.name, 0)
            value = self._parameter(source)
            yield DocumentOp(source.name, "constant", "constant", (), (value,), {"const": value})

    def _parameter(self, node: Node) -> Value:
        """Returns a weight or constant, and keeps its values."""
        site = self.converted.site_of(node)
        source = node if site is None else site.node
        value = self._value(node)
        if source in self.converted.values:
            self.parameters[value.name] = self.converted.values[source]
        return value

    def _result(self, node: Node) -> Value:
        site = self.results.get(node)
        value = self._value(node)
        return value if site is None else dataclasses.replace(value, quantized=_numbers(site))

    def _value(self, node: Node) -> Value:
        site = self.converted.site_of(node)
        source: Any = node if site is None else site.node
        quantized = None if site is None else _numbers(site)
        if quantized is None and source.name in self.converted.carried:
            qparams = self.converted.carried[source.name]
            parts = (qparams.scheme.describe(), qparams.scale, qparams.zero_point)
            quantized = TensorQuantization(source.name, *parts)
        producer, index = self.producers.get(source, ("", 0))
        name = self.converted.inputs.get(source, source.name)
        shape = tuple(int(n) for n in source.shape or ())
        return Value(name, producer, index, shape, str(np.dtype(source.dtype)), quantized)


def _numbers(site: QuantizedSite) -> TensorQuantization:
    if site.sort == "bias":
        scale = site.bias_scale
        return TensorQuantization(site.name, "int32 sym", scale, np.zeros(scale.shape, np.int32))
    qparams = site.qparams
    return TensorQuantization(site.name, qparams.scheme.describe(), qparams.scale, qparams.zero_point)


def _plain(value: Any) -> bool:
    """Whether a document can hold ``value``: a number, a text, None, or a sequence of these."""
    if isinstance(value, (tuple, list)):
        return all(_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))
