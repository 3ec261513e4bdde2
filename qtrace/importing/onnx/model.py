"""An ONNX file as frozen data, and the values of its names in the graph that is built.

Nothing in a file runs, and sizes are checked before memory is allocated.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner

from qtrace.errors import ExportError, ImportingError
from qtrace.graph.origin import Move
from qtrace.graph.types import TensorNode
from qtrace.onnxfile.external_data import count_bytes, map_tensor, read_model, without_large_values
from qtrace.onnxfile.fragment import FragmentTensor
from qtrace.onnxfile.model import MAX_DEPTH, MAX_NODES, bodies_of, captured_names
from qtrace.preparation.passes.quantized_file import StoredGrid
from qtrace.storage.files import problem

__all__ = [
    "DEFAULT_DOMAINS",
    "LATEST_OPSET",
    "MAX_ELEMENTS",
    "OF_ONNXRUNTIME",
    "UNCHANGED",
    "Computed",
    "Graph",
    "GraphInput",
    "OnnxNode",
    "OpaqueValue",
    "QuantizedIntegers",
    "Refused",
    "Sizes",
    "SplitTensors",
    "Stored",
    "Value",
    "array_of",
    "is_float",
    "load_model",
    "load_structure",
    "node_like",
    "read_graph",
    "read_version",
    "standard_opset",
    "stored_tensors",
]

DEFAULT_DOMAINS = ("", "ai.onnx")
"""The names of ONNX's own domain."""
OF_ONNXRUNTIME = {op: onnx.defs.get_schema(op).since_version for op in ("LayerNormalization",)}
"""Ops that onnxruntime has in ONNX's own domain at every opset -> the first opset of ONNX that has them."""
LATEST_OPSET = 23  # nodes with later definitions are kept as they are, since their meaning may differ
# Ops whose definitions since then, up to opset 28, differ only by the types that they take.
UNCHANGED = {
    *(
        "Cast",
        "CastLike",
        "Celu",
        "Compress",
        "Constant",
        "ConstantOfShape",
        "DepthToSpace",
        "Einsum",
        "Flatten",
    ),
    *(
        "Identity",
        "If",
        "Loop",
        "Mod",
        "OneHot",
        "Pad",
        "Range",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "Reshape",
    ),
    *("ReverseSequence", "Scan", "Shape", "Size", "SpaceToDepth", "Squeeze", "TopK", "Transpose", "Unique"),
    *("Unsqueeze", "QuantizeLinear", "DequantizeLinear"),
}

MAX_ELEMENTS = int(np.iinfo(np.int32).max)  # of one tensor
_ANY_DOMAIN = "qtrace.onnxruntime"
_OPSETS = range(6, 29)


@dataclass(frozen=True)
class OnnxNode:
    """A node of a file.

    Attributes:
        op: the kind, such as ``Conv``.
        domain: "" for ONNX's own ops.
        name: the name in the file, or the name of the first output.
        inputs: names of values; "" for an optional input that is left out.
        outputs: names of values; "" for an output that is left out.
        attributes: Python values, arrays, and `onnx.GraphProto` for bodies.
        version: the opset in which the op got the definition that the file means.
        proto: the node as stored.
        title: the path of the module that calls the op, where the exporter keeps it; else "".
    """

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    version: int
    proto: onnx.NodeProto = field(repr=False, compare=False)
    title: str = ""

    @property
    def is_known(self) -> bool:
        """Whether qtrace knows the definition of the op, or it is not one of ONNX's own."""
        return bool(self.domain) or self.version <= LATEST_OPSET or self.op in UNCHANGED

    @property
    def label(self) -> str:
        """The kind and the name for messages."""
        kind = f"{self.domain}.{self.op}" if self.domain else self.op
        return f"{kind} {self.name!r}"


def node_like(
    node: OnnxNode,
    op: str,
    inputs: Sequence[str],
    outputs: str | Sequence[str],
    opsets: Mapping[str, int],
    **attributes: Any,
) -> OnnxNode:
    """Returns a node of ONNX's own that is written in the place of another one.

    Args:
        node: the node of the file.
        op: the kind of the new node.
        inputs: the names of its inputs; the last ones may be "".
        outputs: the names of its outputs, or of the only one.
        opsets: the versions that the model imports.
        **attributes: its attributes.
    """
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    given = tuple(inputs)
    while given and not given[-1]:
        given = given[:-1]
    proto = onnx.helper.make_node(op, given, names, name=node.name, **attributes)
    version = read_version(op, "", opsets.get("", 1)) or 1
    return OnnxNode(op, "", node.name, given, names, attributes, version, proto, node.title)


@dataclass(frozen=True)
class GraphInput:
    """An input of a graph.

    Attributes:
        name: the name in the file.
        dtype: the numpy dtype that the file declares; void for an input of a body that declares none.
        sizes: one an axis: a number, or the name of an open axis, "" without one; None if the rank is open.
    """

    name: str
    dtype: np.dtype[Any]
    sizes: tuple[int | str, ...] | None


@dataclass(frozen=True)
class Graph:
    """A graph or the body of a control flow node.

    Attributes:
        name: the name in the file.
        nodes: in an order in which each can be computed.
        inputs: without initializers.
        outputs: names of values.
        output_dtypes: the numpy dtype of each output as declared; None where the file is silent.
        stored: initializers by name.
    """

    name: str
    nodes: tuple[OnnxNode, ...]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[str, ...]
    output_dtypes: tuple[np.dtype[Any] | None, ...]
    stored: Mapping[str, np.ndarray]


def count_readers(graph: Graph) -> Counter[str]:
    """Counts who reads each tensor of a graph: nodes, the bodies of nodes, and the graph's outputs."""
    readers = Counter(name for node in graph.nodes for name in node.inputs)
    readers.update(name for node in graph.nodes for name in captured_names(node.proto))
    readers.update(graph.outputs)
    return readers


def standard_opset(model: onnx.ModelProto) -> int | None:
    """Returns the opset of ONNX's own domain that a model imports; None if it imports none."""
    return next((o.version for o in model.opset_import if o.domain in DEFAULT_DOMAINS), None)


def read_graph(
    proto: onnx.GraphProto, opsets: Mapping[str, int], stored: Mapping[str, np.ndarray], body: bool = False
) -> Graph:
    """Reads the nodes, inputs and outputs of a graph.

    Args:
        proto: the graph, or the body of a node.
        opsets: the version of each domain that the model imports.
        stored: its initializers by name.
        body: whether it is the body of a node, whose inputs need no type.

    Raises:
        ImportingError: when ONNX lacks the op in that opset, with all such nodes.
    """
    nodes, problems = [], []
    for index, node in enumerate(proto.node):
        name = node.name or next((o for o in node.output if o), f"node {index}")
        domain = "" if node.domain in DEFAULT_DOMAINS else node.domain
        version = read_version(node.op_type, domain, opsets.get(domain, 1))
        if version is None:
            problems.append(f"{node.op_type} {name!r}")
            continue
        attributes = {a.name: _attribute(a) for a in node.attribute}
        nodes.append(
            OnnxNode(
                node.op_type, domain, name, tuple(node.input), tuple(node.output), attributes, version, node
            )
        )
    if problems:
        raise ImportingError(f"opset {opsets.get('', 1)} lacks such an op: {', '.join(problems)}.")
    inputs = tuple(_input(value, body) for value in proto.input if value.name not in stored)
    outputs = tuple(value.name for value in proto.output)
    dtypes = tuple(_dtype(value.type.tensor_type.elem_type) for value in proto.output)
    return Graph(proto.name, tuple(nodes), inputs, outputs, dtypes, stored)


def read_version(op: str, domain: str, opset: int) -> int | None:
    """Returns the opset that defined the op as a model of ``opset`` means it; None if there is none."""
    if domain:
        return opset
    opset = max(opset, OF_ONNXRUNTIME.get(op, opset))
    try:
        return int(onnx.defs.get_schema(op, max_inclusive_version=opset, domain=domain).since_version)
    except onnx.defs.SchemaError:
        return None


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if attribute.type == onnx.AttributeProto.STRINGS:
        return [item.decode("utf-8", "replace") for item in value]
    if attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS):
        return list(value)
    return value


def _input(value: onnx.ValueInfoProto, body: bool) -> GraphInput:
    tensor = value.type.tensor_type
    dtype = _dtype(tensor.elem_type)
    if dtype is None and body:
        return GraphInput(value.name, np.dtype(np.void), None)
    if dtype is None:
        kind = value.type.WhichOneof("value") or "nothing"
        raise ImportingError(f"input {value.name!r} is declared as {kind}, not as a tensor of numbers.")
    if not tensor.HasField("shape"):
        return GraphInput(value.name, dtype, None)
    sizes: list[int | str] = []
    for axis in tensor.shape.dim:
        sizes.append(int(axis.dim_value) if axis.dim_value > 0 else axis.dim_param)  # or -1, if it is open
    return GraphInput(value.name, dtype, tuple(sizes))


def _dtype(kind: int) -> np.dtype[Any] | None:
    """Returns the numpy dtype of an ONNX element type; None for strings, unknown and undefined ones."""
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    except (KeyError, ValueError, TypeError):
        return None
    return None if dtype.kind in "OSU" else dtype


def load_model(path: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Reads a model, checks its structure and inlines its functions.

    Returns:
        The model without the values of its large tensors, and the values of its initializers without those
        that hold strings. Those that lie in other files are mapped into memory.

    Raises:
        ImportingError: when the file, or one of its tensors, is missing, is no ONNX model, or is damaged.
    """
    whole, model = _read(path)
    numbers = (tensor for tensor in whole.graph.initializer if tensor.data_type != onnx.TensorProto.STRING)
    try:
        _refuse_sparse(whole.graph)
        return model, {tensor.name: array_of(tensor, path) for tensor in numbers}
    except ImportingError as error:
        raise ImportingError(f"{path}: {error}") from error.__cause__


def load_structure(path: Path) -> onnx.ModelProto:
    """Reads a model as `load_model` does, without the values of its tensors, which may be missing."""
    return _read(path)[1]


def _read(path: Path) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Returns the model as it is in the file, and the checked model without the values of large tensors."""
    if wrong := problem(path):
        raise ImportingError(wrong)
    if not path.is_file():
        raise ImportingError(f"{path} is not a file: name an ONNX model.")
    try:
        model = read_model(path)
    except ExportError as error:
        raise ImportingError(str(error)) from error
    _check_size(path, model)
    checked = without_large_values(model)
    for value in (*checked.graph.input, *checked.graph.output):
        if value.type.HasField("tensor_type"):  # runtimes leave the shape of an output to inference
            value.type.tensor_type.shape.SetInParent()
    _leave_to_onnxruntime(checked)
    try:
        onnx.checker.check_model(checked)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise ImportingError(f"{path} is not a valid ONNX model: {_line(error)}.") from error
    return model, _inlined(without_large_values(model), path)


def _leave_to_onnxruntime(checked: onnx.ModelProto) -> None:
    """Takes the nodes out of the check that onnxruntime has in ONNX's own domain at every opset.

    Its optimizer writes LayerNormalization into files of opsets before 17, which has it.
    """
    opset = standard_opset(checked) or 0
    own = [
        node
        for node in _all_nodes(checked.graph, {})
        if node.domain in DEFAULT_DOMAINS and opset < OF_ONNXRUNTIME.get(node.op_type, 0)
    ]
    if not own:
        return
    for node in own:
        node.domain = _ANY_DOMAIN
    checked.opset_import.append(onnx.helper.make_opsetid(_ANY_DOMAIN, 1))


def _inlined(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Returns a model without functions, of an opset that qtrace reads."""
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except (RuntimeError, ValueError) as error:
            raise ImportingError(f"{path}: its functions cannot be inlined: {_line(error)}.") from error
    opset = standard_opset(model)
    if opset is not None and opset not in _OPSETS:
        raise ImportingError(
            f"{path} has opset {opset}; qtrace reads opsets {_OPSETS[0]} to 23, and later ones where no op "
            "has changed: convert it with onnx.version_converter."
        )
    return model


def _check_size(path: Path, model: onnx.ModelProto) -> None:
    """Refuses a model with too many nodes, a function's nodes counted at each of its calls."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    for count, _ in enumerate(_all_nodes(model.graph, functions), 1):
        if count > MAX_NODES:
            raise ImportingError(f"{path} has more than {MAX_NODES:,} nodes: qtrace reads no more.")


def _all_nodes(
    graph: onnx.GraphProto | onnx.FunctionProto,
    functions: Mapping[tuple[str, str, str], onnx.FunctionProto],
    depth: int = 0,
) -> Iterator[onnx.NodeProto]:
    if depth > MAX_DEPTH:
        raise ImportingError(f"{graph.name!r}: bodies and functions are nested more than {MAX_DEPTH} deep.")
    for node in graph.node:
        yield node
        bodies: list[onnx.GraphProto | onnx.FunctionProto] = list(bodies_of(node))
        called = functions.get((node.domain, node.op_type, node.overload))
        for body in bodies if called is None else [*bodies, called]:
            yield from _all_nodes(body, functions, depth + 1)


def stored_tensors(graph: onnx.GraphProto, path: Path) -> dict[str, np.ndarray]:
    """Reads the initializers of a graph.

    Args:
        graph: the graph, or the body of a node.
        path: the file, in whose folder external data lie.

    Raises:
        ImportingError: when a tensor's data are missing, of another size than its shape says, or outside of
            the folder.
    """
    _refuse_sparse(graph)
    return {tensor.name: array_of(tensor, path) for tensor in graph.initializer}


def _refuse_sparse(graph: onnx.GraphProto) -> None:
    if graph.sparse_initializer:
        raise ImportingError(
            f"{graph.sparse_initializer[0].values.name!r} is a sparse tensor: store it dense."
        )


def array_of(tensor: onnx.TensorProto, path: Path) -> np.ndarray:
    """Returns the values of a stored tensor.

    Raises:
        ImportingError: when they are strings, missing, of another size than the shape says, or lie outside
            of the folder of ``path``.
    """
    shape = tuple(tensor.dims)
    count = math.prod(shape)
    name = tensor.name or "a constant"
    if any(n < 0 for n in shape) or count > MAX_ELEMENTS:
        raise ImportingError(f"{name}: its shape {list(shape)} is not one that a tensor can have.")
    if tensor.data_type in (onnx.TensorProto.STRING, onnx.TensorProto.UNDEFINED):
        raise ImportingError(f"{name} holds strings or nothing: MegEngine has tensors of numbers only.")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        try:
            return map_tensor(tensor, path)
        except ExportError as error:
            raise ImportingError(f"{name}: {str(error).removeprefix(f'{path}: ')}") from error
    try:
        if tensor.HasField("raw_data") and len(tensor.raw_data) != count_bytes(tensor):
            raise ValueError(f"{len(tensor.raw_data)} bytes for the shape {list(shape)}")
        return onnx.numpy_helper.to_array(tensor)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ImportingError(f"{name} cannot be read: {_line(error)}.") from error


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".")[:300]


@dataclass(frozen=True, eq=False)
class Stored:
    """Numbers that are the same for every input.

    Attributes:
        array: the numbers, in the file's dtype.
        name: the name of the value in the file.
        learned: whether they are an initializer, which may be trained, and not a constant of the graph.
        moves: what made these numbers of the initializer ``name``, if they are a part of it or are ordered
            otherwise.
    """

    array: np.ndarray
    name: str
    learned: bool = False
    moves: tuple[Move, ...] = ()

    @cached_property
    def identity(self) -> Any:
        """A key of these numbers; a transposed tensor of the same name has another.

        The numbers are read once: those that are mapped from a file come into memory by it.
        """
        values = np.ascontiguousarray(self.array).reshape(-1).view(np.uint8)
        return self.name, self.moves, self.array.shape, hashlib.blake2b(values.data).digest()


@dataclass(frozen=True, eq=False)
class Sizes:
    """Numbers that are computed from shapes and depend on open axes.

    Attributes:
        arrays: the numbers for the recorded sizes, and for the other ones at which the builder runs.
        numbers: an array of objects of the same shape: a `Size` where a number depends on an open axis.
    """

    arrays: tuple[np.ndarray, ...]
    numbers: np.ndarray


@dataclass(frozen=True, eq=False)
class Computed:
    """A tensor that the graph computes.

    Attributes:
        node: the node of the tensor.
        dtype: the dtype in the file, such as int64 where the node is int32.
    """

    node: TensorNode
    dtype: np.dtype


@dataclass(frozen=True, eq=False)
class QuantizedIntegers:
    """Integers that QuantizeLinear gives, and that ops move.

    Attributes:
        node: the node of the floats that they stand for.
        dtype: the type of the integers.
        grid: their scale and zero point.
    """

    node: TensorNode
    dtype: np.dtype
    grid: StoredGrid


@dataclass(frozen=True, eq=False)
class SplitTensors:
    """A sequence of tensors that a tensor was split into.

    Attributes:
        values: the tensors.
    """

    values: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class OpaqueValue:
    """A result of a kept node that no traced graph holds: a sequence, text, a shape that values decide.

    Attributes:
        part: the node, as `OpaqueNodes` keeps it.
        index: the place of the output.
        kinds: type and shape for the recorded sizes, and for the other ones at which the builder runs.
    """

    part: Any
    index: int
    kinds: Sequence[FragmentTensor]


@dataclass(frozen=True, eq=False)
class Refused:
    """A tensor that cannot be computed, since its node or one before it was refused."""


Value = Stored | Sizes | Computed | QuantizedIntegers | SplitTensors | OpaqueValue | Refused


def is_float(dtype: np.dtype) -> bool:
    """Returns whether tensors of ``dtype`` are floats, which a graph carries as float32.

    numpy lacks a bfloat16 of its own: the one of ONNX's package is of the kind of raw bytes.
    """
    return dtype.kind == "f" or dtype.name == "bfloat16"
