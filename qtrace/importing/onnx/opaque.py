"""Keeps nodes without an equal in MegEngine as they are in the file: as opaque nodes of the graph.

A result that no traced graph can hold stays in the file's form. It is a sequence, text, a type that MegEngine
lacks, or a tensor whose shape depends on values. The nodes that read it are kept together with the node that
gives it, up to results that are tensors of known shape again. Nothing is approximated.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qtrace.errors import ExportError
from qtrace.graph.opaque import OpaqueOp, carried_dtype
from qtrace.graph.types import TensorNode
from qtrace.importing.onnx.layers import Layers, Refusal, Scope
from qtrace.importing.onnx.model import (
    LATEST_OPSET,
    UNCHANGED,
    Computed,
    OnnxNode,
    OpaqueValue,
    QuantizedIntegers,
    Refused,
    Sizes,
    SplitTensors,
    Stored,
    Value,
    read_version,
)
from qtrace.importing.onnx.rewriting import LINEAR
from qtrace.onnxfile.fragment import Fragment, FragmentTensor, infer_outputs
from qtrace.onnxfile.local_session import SessionError
from qtrace.onnxfile.model import RANDOM_OPS, captured_names, own_operators, rename_tensors

_IR_VERSION = 11  # the latest that onnxruntime 1.23 reads


@dataclass(eq=False)
class _Part:
    """A node that is kept, with the values that it reads.

    Attributes:
        order: its place among all kept nodes.
        proto: the node as in the file.
        inputs: the value of each input; None for one that is left out.
        captured: name -> value that its bodies read of the graph around.
        kinds: type and shape of each output, for each probe of open axes.
        for_open_axes: whether MegEngine has a form of it for fixed sizes.
    """

    order: int
    proto: onnx.NodeProto
    inputs: list[Value | None]
    captured: dict[str, Value]
    kinds: list[tuple[FragmentTensor, ...]] = field(default_factory=list)
    for_open_axes: bool = False

    def read(self) -> list[Value]:
        """Returns the values that it reads."""
        return [value for value in (*self.inputs, *self.captured.values()) if value is not None]


class OpaqueNodes:
    """Adds nodes to a graph as opaque nodes.

    Args:
        layers: the graph's modules.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._order = itertools.count()

    def add(
        self,
        node: OnnxNode,
        values: Sequence[Value | None],
        scope: Scope,
        opsets: Mapping[str, int],
        for_open_axes: bool = False,
    ) -> list[Value]:
        """Adds a node; returns what its outputs stand for.

        Args:
            node: the node.
            values: the values of its inputs.
            scope: the values of the graph.
            opsets: the versions of the domains that the model imports.
            for_open_axes: whether MegEngine has a form of it for fixed sizes.

        Raises:
            Refusal: when onnxruntime cannot run the node, or is not installed.
        """
        if importlib.util.find_spec("onnxruntime") is None:
            raise Refusal("needs the package onnxruntime to run as it is in the file")
        if (node.domain, node.op) == ("", "Dropout"):
            raise Refusal("drops values at random: export the network in eval mode")
        if (node.domain, node.op) in (("", "Div"), ("", "Mod")) and _may_divide_by_zero(values):
            raise Refusal("could divide by 0, at which onnxruntime ends the process")
        results: list[Value] = []
        for proto, inputs in _as_in_file(node, values):
            captured = {name: scope[name] for name in captured_names(proto)}
            read = [value for value in (*inputs, *captured.values()) if value is not None]
            if any(isinstance(value, Refused) for value in read):
                return [Refused() for _ in node.outputs]
            part = _Part(
                next(self._order), proto, [results[0] if v is _BEFORE else v for v in inputs], captured
            )
            part.for_open_axes = for_open_axes
            self._infer(part, opsets)
            results = self._results(part, node, opsets)
        return results

    def outputs(
        self, values: Sequence[Value], names: Sequence[str], opsets: Mapping[str, int]
    ) -> list[Value]:
        """Returns the outputs of the graph, of which kept tensors become results of one opaque node.

        Raises:
            Refusal: when one is a sequence, text or of a type that MegEngine lacks.
        """
        own = [(v, name) for v, name in zip(values, names, strict=True) if isinstance(v, OpaqueValue)]
        if not own:
            return list(values)
        for value, name in own:
            if carried_dtype(value.kinds[0].dtype) is None:
                raise Refusal(_say_foreign(name, value))
        nodes = self._call([(v.part, v.index) for v, _ in own], [name for _, name in own], "kept", opsets)
        for (value, _), result in zip(own, nodes, strict=True):
            if isinstance(result, Computed) and any(kind.fixed_shape is None for kind in value.kinds):
                result.node._shape = None  # the values decide it
        computed = dict(zip((name for _, name in own), nodes, strict=True))
        return [computed.get(name, value) for value, name in zip(values, names, strict=True)]

    def _infer(self, part: _Part, opsets: Mapping[str, int]) -> None:
        """Infers the types of a node's outputs, from the types of the values that it reads."""
        probes = max((len(self._kinds_of(value)) for value in part.read()), default=1)
        for probe in range(probes):
            model, shapes = _alone(part, [self._kinds_of(value) for value in part.read()], probe, opsets)
            try:
                part.kinds.append(infer_outputs(model, shapes))
            except SessionError as error:
                raise Refusal(f"is refused by onnxruntime, too ({error.reason})") from error
            except (ExportError, ValueError) as error:
                raise Refusal(f"cannot be kept as in the file ({str(error).rstrip('.')})") from error

    def _kinds_of(self, value: Value) -> Sequence[Any]:
        """Returns type and shape of a value for each probe; an array for one that is stored, or of sizes."""
        if isinstance(value, OpaqueValue):
            return value.kinds
        if isinstance(value, Stored):
            return (value.array,)
        if isinstance(value, (Computed, QuantizedIntegers)):
            dtype = value.dtype
            return [(dtype, shape) for shape in self._layers.builder.shapes(value.node)]
        if isinstance(value, Sizes):
            return value.arrays
        assert isinstance(value, SplitTensors)
        return [[self._kinds_of(item) for item in value.values]]

    def _results(self, part: _Part, node: OnnxNode, opsets: Mapping[str, int]) -> list[Value]:
        if not _depends_on_input(part) and part.proto.op_type not in RANDOM_OPS:
            return self._computed_now(part, opsets)
        places = [i for i, name in enumerate(part.proto.output) if name]
        results: list[Value] = [Refused() for _ in part.proto.output]
        carried = []
        for kind, place in enumerate(places):
            kinds = tuple(probe[kind] for probe in part.kinds)
            if carried_dtype(kinds[0].dtype) is None or not all(k.has_values for k in kinds):
                results[place] = OpaqueValue(part, place, kinds)
            else:
                carried.append(place)
        if carried:
            names = [part.proto.output[place] for place in carried]
            path = self._layers.names.layer(node, [])
            nodes = self._call([(part, place) for place in carried], names, path, opsets)
            for place, value in zip(carried, nodes, strict=True):
                results[place] = value
        return results

    def _computed_now(self, part: _Part, opsets: Mapping[str, int]) -> list[Value]:
        """Runs a node that reads only stored values."""
        places = [i for i, name in enumerate(part.proto.output) if name]
        kinds = part.kinds[0]
        results: list[Value] = [Refused() for _ in part.proto.output]
        tensors = [(k, place) for k, place in zip(kinds, places, strict=True) if k.dtype is not None]
        for kind, place in zip(kinds, places, strict=True):
            results[place] = OpaqueValue(part, place, (kind,))
        if tensors:
            model, _ = self._model([(part, place) for _, place in tensors], opsets)
            try:
                arrays = Fragment(model).run([])
            except ExportError as error:
                raise Refusal(f"cannot be computed ({str(error).rstrip('.')})") from error
            for (_, place), array in zip(tensors, arrays, strict=True):
                results[place] = Stored(array, part.proto.output[place])
        return results

    def _call(
        self, targets: Sequence[tuple[_Part, int]], names: Sequence[str], path: str, opsets: Mapping[str, int]
    ) -> list[Value]:
        """Adds one opaque node with these results."""
        model, inputs = self._model(targets, opsets)
        if path == "kept":
            path = self._layers.names.tensor(path)
        op = OpaqueOp(model, all(part.for_open_axes for part, _ in targets))
        self._tell_outputs(op, targets, inputs)
        nodes = self._layers.builder.call_module(path, op, *inputs, name=list(names))
        nodes = nodes if isinstance(nodes, tuple) else (nodes,)
        dtypes = [_kind_of(part, place).dtype for part, place in targets]
        return [Computed(node, dtype) for node, dtype in zip(nodes, dtypes, strict=True) if dtype is not None]

    def _tell_outputs(
        self, op: OpaqueOp, targets: Sequence[tuple[_Part, int]], inputs: Sequence[TensorNode]
    ) -> None:
        """Tells an op the shapes of its outputs, which were inferred node by node.

        For all nodes at once less may be known: that a TopK of as many values as others decide has seven.
        """
        shapes = [self._layers.builder.shapes(node) for node in inputs]
        values = [self._layers.builder.known_values(node) for node in inputs]
        probes = max((len(part.kinds) for part, _ in targets), default=1)
        for probe in range(max([probes, *map(len, shapes), *map(len, values)])):
            outputs = [_kind_of(part, place, probe) for part, place in targets]
            known = {i: several[min(probe, len(several) - 1)] for i, several in enumerate(values) if several}
            sizes = [several[min(probe, len(several) - 1)] for several in shapes]
            op.fragment.learn(sizes, outputs, known)

    def _model(
        self, targets: Sequence[tuple[_Part, int]], opsets: Mapping[str, int]
    ) -> tuple[bytes, list[TensorNode]]:
        """Returns the model that computes some results, and the nodes of its inputs."""
        writer = _Writer(self._layers)
        parts = {part for part, _ in targets}
        pending = list(parts)
        while pending:
            for value in pending.pop().read():
                items = value.values if isinstance(value, SplitTensors) else (value,)
                before = {v.part for v in items if isinstance(v, OpaqueValue)} - parts
                parts |= before
                pending += before
        for part in sorted(parts, key=lambda part: part.order):
            writer.write(part)
        outputs = [(writer.names[part, place], _kind_of(part, place)) for part, place in targets]
        return writer.model(outputs, opsets), list(writer.nodes)


def _say_foreign(name: str, value: OpaqueValue) -> str:
    """Says that an output is no tensor of MegEngine's, and how a file without it is made."""
    proto = value.part.proto
    source = next(filter(None, proto.input), "")
    cure = (
        f"read the file up to {source!r} by from_onnx(outputs=) (--outputs)"
        if source
        else "write the file without it"
    )
    if proto.op_type == "ZipMap":
        cure = f"write the file without ZipMap (options={{'zipmap': False}} of skl2onnx), or {cure}"
    return f"output {name!r} is {value.kinds[0].kind}, which MegEngine lacks: {cure}"


_BEFORE: Any = object()  # the result of the node before, of two that were joined


def _may_divide_by_zero(values: Sequence[Value | None]) -> bool:
    """Returns whether a division is one of integers by 0, or by numbers that only onnxruntime computes.

    What the graph computes is looked at before onnxruntime divides by it.
    """
    divisor = values[1] if len(values) > 1 else None
    if isinstance(divisor, Stored):
        return divisor.array.dtype.kind in "iu" and not divisor.array.all()
    if isinstance(divisor, OpaqueValue):
        return "float" not in divisor.kinds[0].kind and "double" not in divisor.kinds[0].kind
    return isinstance(divisor, QuantizedIntegers)


def _as_in_file(
    node: OnnxNode, values: Sequence[Value | None]
) -> list[tuple[onnx.NodeProto, list[Value | None]]]:
    """Returns the nodes of the file that a node stands for, with the values of their inputs."""
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    proto.op_type, proto.domain = node.op, node.domain
    proto.input[:], proto.output[:] = node.inputs, node.outputs
    if (node.domain, node.op) != LINEAR:
        return [(proto, list(values))]
    product = f"{node.outputs[0]}_product"
    first, second = onnx.NodeProto(), helper.make_node("Add", [product, node.inputs[2]], list(node.outputs))
    first.CopyFrom(node.proto)
    first.output[:] = [product]
    return [(first, list(values[:2])), (second, [_BEFORE, values[2]])]


def _kind_of(part: _Part, place: int, probe: int = 0) -> FragmentTensor:
    places = [i for i, name in enumerate(part.proto.output) if name]
    return part.kinds[min(probe, len(part.kinds) - 1)][places.index(place)]


def _depends_on_input(part: _Part) -> bool:
    """Returns whether a node reads a value of the graph, itself or through nodes that are kept with it."""
    pending: list[Value] = list(part.read())
    while pending:
        value = pending.pop()
        if isinstance(value, (Computed, Sizes, QuantizedIntegers)):
            return True
        if isinstance(value, SplitTensors):
            pending += value.values
        if isinstance(value, OpaqueValue):
            if value.part.proto.op_type in RANDOM_OPS:
                return True
            pending += value.part.read()
    return False


def _type(kind: str) -> onnx.TypeProto:
    """Returns the type that onnxruntime spells so: ``tensor(float)``, ``seq(tensor(int64))``."""
    head, _, rest = kind.partition("(")
    inner = rest.removesuffix(")")
    if head == "tensor":
        return helper.make_tensor_type_proto(_element(inner), None)
    if head == "seq":
        return helper.make_sequence_type_proto(_type(inner))
    if head == "optional":
        return helper.make_optional_type_proto(_type(inner))
    if head == "map":
        key, _, value = inner.partition(",")
        return helper.make_map_type_proto(_element(key.strip()), _type(_as_tensor(value.strip())))
    raise Refusal(f"gives {kind}, which cannot be kept")


def _as_tensor(kind: str) -> str:
    return kind if "(" in kind else f"tensor({kind})"


def _element(kind: str) -> int:
    return onnx.TensorProto.DataType.Value(kind.upper())


def _alone(
    part: _Part, kinds: Sequence[Sequence[Any]], probe: int, opsets: Mapping[str, int]
) -> tuple[onnx.ModelProto, list[Sequence[int | None] | None]]:
    """Returns a model of one node whose inputs have the types of its values, and the shapes of these."""
    names = [name for name, value in zip(part.proto.input, part.inputs, strict=True) if value is not None]
    graph = onnx.GraphProto(name="node")
    shapes: list[Sequence[int | None] | None] = []
    for name, several in zip([*names, *part.captured], kinds, strict=True):
        if any(name == known.name for known in (*graph.input, *graph.initializer)):
            continue
        kind = several[min(probe, len(several) - 1)]
        if isinstance(kind, np.ndarray):
            graph.initializer.append(numpy_helper.from_array(np.array(kind, order="C"), name))
            continue
        if isinstance(kind, FragmentTensor):
            info, shape = onnx.ValueInfoProto(name=name, type=_type(kind.kind)), kind.shape
        elif isinstance(kind, list):  # a sequence of tensors that a tensor was split into
            element = _dtype_of(kind[0][0]) if kind else np.dtype(np.float32)
            tensor = helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(element), None)
            info, shape = onnx.ValueInfoProto(name=name, type=helper.make_sequence_type_proto(tensor)), None
        else:
            dtype, shape = kind
            info = helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), None)
        graph.input.append(info)
        shapes.append(shape)
    graph.node.append(part.proto)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in part.proto.output if name)
    return _wrapped(graph, opsets), shapes


def _dtype_of(kind: Any) -> np.dtype[Any]:
    return kind.dtype if isinstance(kind, np.ndarray) else kind[0]


def _wrapped(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> onnx.ModelProto:
    model = onnx.ModelProto(ir_version=_IR_VERSION, graph=graph)
    for domain, version in opsets.items():
        version = version if domain else _runnable(graph, version)
        model.opset_import.append(helper.make_opsetid(domain, version))
    return model


def _runnable(graph: onnx.GraphProto, opset: int) -> int:
    """Returns an opset that onnxruntime takes, if it defines the ops of a graph as ``opset`` does."""
    known = opset <= LATEST_OPSET or all(
        (version := read_version(op, "", opset)) is not None and (version <= LATEST_OPSET or op in UNCHANGED)
        for op in own_operators(graph)
    )
    return min(opset, LATEST_OPSET) if known else opset


def _declared(shapes: Sequence[Sequence[int]]) -> list[int | None]:
    """Returns the sizes that an input of a kept node is declared with, given its shape at each probe.

    The length of a vector may be the number of axes of another tensor, as for the sizes of a Resize,
    which onnxruntime has to know. Other sizes stay open: the node runs at all that its graph runs at.
    """
    first = shapes[0]
    known = len(first) == 1 and len({tuple(shape) for shape in shapes}) == 1
    return list(first) if known else [None] * len(first)


class _Writer:
    """Writes kept nodes into a model.

    Args:
        layers: the graph's modules.

    Attributes:
        names: a kept node and the place of an output -> its name in the model.
        nodes: the nodes of the inputs of the model.
    """

    def __init__(self, layers: Layers) -> None:
        self.names: dict[tuple[_Part, int], str] = {}
        self.nodes: dict[TensorNode, str] = {}
        self._layers = layers
        self._graph = onnx.GraphProto(name="kept")
        self._stored: dict[int, str] = {}
        self._values: dict[int, str] = {}
        self._used: set[str] = set()

    def write(self, part: _Part) -> None:
        """Adds a node."""
        proto = onnx.NodeProto()
        proto.CopyFrom(part.proto)
        names = {name: self._name(value, name) for name, value in part.captured.items()}
        inputs = [
            "" if value is None else self._name(value, name)
            for name, value in zip(part.proto.input, part.inputs, strict=True)
        ]
        for place, name in enumerate(part.proto.output):
            if name:
                self.names[part, place] = self._claim(name)
        outputs = {name: self.names[part, i] for i, name in enumerate(part.proto.output) if name}
        changed = {old: new for old, new in {**names, **outputs}.items() if old != new}
        rename_tensors(proto, changed)
        proto.input[:] = inputs
        self._graph.node.append(proto)

    def _name(self, value: Value, name: str) -> str:
        """Returns the name of a value in the model, which gets an input or a constant for it."""
        if isinstance(value, OpaqueValue):
            return self.names[value.part, value.index]
        key = id(value)
        if key not in self._values:
            self._values[key] = self._added(value, name)
        return self._values[key]

    def _added(self, value: Value, name: str) -> str:
        if isinstance(value, Stored):
            own = self._claim(name)
            self._graph.initializer.append(numpy_helper.from_array(np.array(value.array, order="C"), own))
            return own
        if isinstance(value, SplitTensors):
            items = [self._name(item, f"{name}_{i}") for i, item in enumerate(value.values)]
            own = self._claim(name)
            self._graph.node.append(helper.make_node("SequenceConstruct", items, [own]))
            return own
        if isinstance(value, Sizes):
            node, dtype = self._layers.sizes_tensor(value, name), value.arrays[0].dtype
            return self._input(node, name, dtype)
        if isinstance(value, QuantizedIntegers):
            return self._integers(value, name)
        assert isinstance(value, Computed)
        if value.dtype.name == "bfloat16":
            source, own = self._input(value.node, f"{name}_float", np.dtype(np.float32)), self._claim(name)
            to = onnx.TensorProto.BFLOAT16
            self._graph.node.append(helper.make_node("Cast", [source], [own], to=to))
            return own
        return self._input(value.node, name, value.dtype)

    def _integers(self, value: QuantizedIntegers, name: str) -> str:
        source = self._input(value.node, f"{name}_float", np.dtype(np.float32))
        own, grid = self._claim(name), value.grid
        pair = [self._claim(f"{name}_scale"), self._claim(f"{name}_zero_point")]
        scale, zero = np.float32(grid.scale.reshape(())), grid.zero_point.reshape(()).astype(value.dtype)
        for tensor, array in zip(pair, (scale, zero), strict=True):
            self._graph.initializer.append(numpy_helper.from_array(np.array(array), tensor))
        self._graph.node.append(helper.make_node("QuantizeLinear", [source, *pair], [own]))
        return own

    def _input(self, node: TensorNode, name: str, dtype: np.dtype[Any]) -> str:
        if node not in self.nodes:
            self.nodes[node] = self._claim(name)
            kind = helper.np_dtype_to_tensor_dtype(dtype)
            axes = _declared(self._layers.builder.shapes(node))
            self._graph.input.append(helper.make_tensor_value_info(self.nodes[node], kind, axes))
        return self.nodes[node]

    def _claim(self, name: str) -> str:
        base, count, own = name or "value", 0, name or "value"
        while own in self._used:
            count += 1
            own = f"{base}_{count}"
        self._used.add(own)
        return own

    def model(self, outputs: Sequence[tuple[str, FragmentTensor]], opsets: Mapping[str, int]) -> bytes:
        """Returns the model, serialized.

        Raises:
            Refusal: when it is larger than a protobuf message.
        """
        for name, kind in outputs:
            rank = None if kind.shape is None else [None] * len(kind.shape)
            info = helper.make_tensor_value_info(name, _type(kind.kind).tensor_type.elem_type, rank)
            self._graph.output.append(info)
        model = _wrapped(self._graph, opsets)
        if model.ByteSize() > onnx.checker.MAXIMUM_PROTOBUF:
            raise Refusal("holds more than 2 GB of constants, which a kept node cannot")
        return bytes(model.SerializeToString())
