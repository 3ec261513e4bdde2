"""A converted graph as plain data for documents: ops without fake quants, tensors with their quantization."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from megengine import Parameter

from qtrace.export.converted import ConvertedGraph
from qtrace.graph.types import CallFunction, Constant, Expr, GetAttr, ModuleNode, Node
from qtrace.graph.walk import node_path, op_label, owner, signature, unused_name
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite

# Kind of a norm -> parameter of its function, or tensor of its layer -> type of the weight.
_AFFINE = {"weight": "gamma", "bias": "beta"}
_NORMS = {
    "batch_norm": {**_AFFINE, "running_mean": "mean", "running_var": "var"},
    **dict.fromkeys(("layer_norm", "group_norm", "instance_norm", "general_norm", "rms_norm"), _AFFINE),
}
# Parameters of functions that are weights where they are stored and not computed.
_WEIGHTS = frozenset(("weight", "bias", "running_mean", "running_var"))


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
class Rounding:
    """The rounding of a value on its way to a reader.

    Attributes:
        site: the site.
        shape: the shape of the scales, or of the bias for a bias.
    """

    site: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class OperandRole:
    """A tensor that an op reads.

    Attributes:
        key: ``input_0`` and so on, or the type of a weight.
        roundings: the roundings between the stored or computed value and the op, in order.
    """

    key: str
    roundings: tuple[Rounding, ...] = ()


@dataclass(frozen=True)
class ModuleTensor:
    """A parameter, buffer or constant as the module has it.

    Attributes:
        path: its path; "" for a constant of the graph.
        shape: its shape there.
        trainable: whether it is a Parameter.
    """

    path: str
    shape: tuple[int, ...]
    trainable: bool


@dataclass(frozen=True)
class DocumentOp:
    """One op of a document.

    Attributes:
        name: the name of the first output.
        kind: the op kind, "" without a rule.
        label: the function or module that it calls.
        inputs: the tensors that it reads, without weights.
        outputs: the tensors that it computes.
        weights: type of a weight -> weight. A layer has "weight" and "bias", a norm "gamma", "beta", "mean"
            and "var", a constant "const". Tensors of other modules have their names.
        attrs: the constant arguments.
        path: the path of the module in whose ``forward`` it was recorded.
        expr: the expr; None for inputs and constants.
        operands: node that the expr reads -> what that is among inputs and weights.
        stored: type of a weight -> how the module stores it.
    """

    name: str
    kind: str
    label: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: dict[str, Value] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)
    path: str = ""
    expr: Expr | None = None
    operands: dict[Node, OperandRole] = field(default_factory=dict)
    stored: dict[str, ModuleTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphDocument:
    """A graph as plain data.

    Attributes:
        name: the name of the graph.
        backend: the backend that it was prepared for.
        ops: all ops in order, with ops of kind ``input`` and ``constant``.
        outputs: the outputs of the graph.
        output_roundings: the roundings of each output after the value that its op computes.
        parameters: name of a weight or constant -> its value, where it is stored and not computed.
    """

    name: str
    backend: str
    ops: tuple[DocumentOp, ...]
    outputs: tuple[Value, ...]
    output_roundings: tuple[tuple[Rounding, ...], ...] = ()
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
        self.names: dict[int, str] = {}  # id of a tensor of a module -> its name in the document
        self.taken = set(converted.nodes)

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
        roundings = tuple(self._roundings(n) for n in converted.outputs)
        return GraphDocument(name, backend, tuple(document_ops), outputs, roundings, self.parameters)

    def _op(self, expr: Expr, call: OpCall | None) -> Iterator[DocumentOp]:
        """Yields the op of an expr, after the constants that it is the first to read."""
        roles = self._weight_roles(expr, call)
        read = [n for n in expr.inputs if not isinstance(n, ModuleNode) and n not in roles]
        for node in read:
            yield from self._constant(node)
        name = expr.outputs[0].name
        self.producers.update((n, (name, i)) for i, n in enumerate(expr.outputs))
        weights, stored = self._module_tensors(expr, call)
        weights |= {role: self._parameter(n) for n, role in roles.items()}
        stored |= {role: self._stored(n) for n, role in roles.items()}
        operands = {n: OperandRole(role, self._roundings(n)) for n, role in roles.items()}
        for i, node in enumerate(read):
            operands.setdefault(node, OperandRole(f"input_{i}", self._roundings(node)))
        yield DocumentOp(
            name,
            "" if call is None else call.kind,
            op_label(expr),
            tuple(self._value(n) for n in read),
            tuple(self._result(n) for n in expr.outputs),
            weights,
            {} if call is None else dict(call.attrs),
            _forward_path(expr, stored),
            expr,
            operands,
            stored,
        )

    def _weight_roles(self, expr: Expr, call: OpCall | None) -> dict[Node, str]:
        """Returns node -> type of the weight, for the stored tensors that are weights of the op."""
        named = {} if call is None else {"weight": call.weight, "bias": call.bias}
        renamed = {} if call is None else _NORMS.get(call.kind, {})
        if isinstance(expr, CallFunction) and not any(n is not None for n in named.values()):
            try:
                bound = signature(expr.func).bind(*expr.args, **expr.kwargs).arguments
            except TypeError:
                bound = {}
            named = {key: value for key, value in bound.items() if key in _WEIGHTS}
            if call is not None and call.kind == "prelu":  # MegEngine's function calls its slopes y
                named = {"weight": expr.args[-1]}
        order = sorted(named, key=lambda key: [*renamed, key].index(key))
        roles: dict[Node, str] = {}
        for key in order:
            if isinstance(named[key], Node) and self._is_stored(named[key]):
                roles.setdefault(named[key], renamed.get(key, key))
        return roles

    def _module_tensors(
        self, expr: Expr, call: OpCall | None
    ) -> tuple[dict[str, Value], dict[str, ModuleTensor]]:
        """Returns the tensors of a called module by the types of the weights, with their places."""
        module = owner(expr)
        if module is None:
            return {}, {}
        path = getattr(expr.inputs[0].expr, "name", "")
        renamed = {} if call is None else _NORMS.get(call.kind, {})
        tensors = dict(module.named_tensors())
        weights, stored = {}, {}
        for name in sorted(tensors, key=lambda name: [*renamed, name].index(name)):
            tensor, place = tensors[name], f"{path}.{name}".lstrip(".")
            if id(tensor) not in self.names:
                self.names[id(tensor)] = unused_name(place.replace(".", "_"), self.taken.__contains__)
                self.taken.add(self.names[id(tensor)])
            role, key = renamed.get(name, name), self.names[id(tensor)]
            shape = tuple(int(n) for n in tensor.shape)
            weights[role] = Value(key, "", 0, shape, str(np.dtype(tensor.dtype)), None)
            stored[role] = ModuleTensor(place, shape, isinstance(tensor, Parameter))
            self.parameters[key] = tensor.numpy()
        return weights, stored

    def _is_stored(self, node: Node) -> bool:
        return isinstance(self._source(node).expr, (GetAttr, Constant))

    def _source(self, node: Node) -> Any:
        site = self.converted.site_of(node)
        return node if site is None else site.node

    def _stored(self, node: Node) -> ModuleTensor:
        source = self._source(node)
        expr, shape = source.expr, tuple(int(n) for n in source.shape or ())
        if isinstance(expr, Constant):
            return ModuleTensor("", shape, False)
        return ModuleTensor(expr.name, shape, isinstance(self.converted.attribute(expr), Parameter))

    def _roundings(self, node: Node) -> tuple[Rounding, ...]:
        """Returns the roundings between the value that is stored or computed, and ``node``."""
        steps: list[Rounding] = []
        while (site := self.converted.site_of(node)) is not None:
            steps.append(Rounding(site.name, tuple(int(n) for n in site.fake_quant.shape)))
            node = site.source
        return tuple(reversed(steps))

    def _constant(self, node: Node) -> Iterator[DocumentOp]:
        """Yields the op of a constant when it is first read or returned."""
        site = self.converted.site_of(node)
        source = node if site is None else site.node
        if isinstance(source.expr, (GetAttr, Constant)) and source not in self.constants:
            self.constants.add(source)
            self.producers[source] = (source.name, 0)
            value = self._parameter(source)
            stored = {"const": self._stored(source)}
            weights = {"const": value}
            yield DocumentOp(source.name, "constant", "constant", (), (value,), weights, stored=stored)

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


def _forward_path(expr: Expr, stored: dict[str, ModuleTensor]) -> str:
    """Returns the path of the module in whose ``forward`` an expr was recorded.

    MegEngine records the path of the called layer: it names the called module, or the owner of the weights.
    """
    path = node_path(expr.outputs[0])
    layers = {tensor.path.rpartition(".")[0] for tensor in stored.values()}
    if owner(expr) is not None:
        layers = {node_path(expr.inputs[0]), getattr(expr.inputs[0].expr, "name", "")}
    return path.rpartition(".")[0] if path in layers else path


def is_plain(value: Any) -> bool:
    """Whether a document can hold ``value``: a number, a text, None, or a sequence of these."""
    if isinstance(value, (tuple, list)):
        return all(is_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))
