"""The parts of an ONNX model that the importer reads, as frozen data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from qtrace.errors import ImportingError
from qtrace.onnxfile.model import captured_names

__all__ = [
    "DEFAULT_DOMAINS",
    "DYNAMIC",
    "LATEST_OPSET",
    "OF_ONNXRUNTIME",
    "UNCHANGED",
    "Graph",
    "GraphInput",
    "OnnxNode",
    "node_like",
    "read_graph",
    "read_version",
    "standard_opset",
]

DYNAMIC = -1  # the size of an axis that the file leaves open
DEFAULT_DOMAINS = ("", "ai.onnx")
"""The names of ONNX's own domain."""
OF_ONNXRUNTIME = {"LayerNormalization": 17}
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
        sizes: one an axis: a number, the name of an open axis, or `DYNAMIC`; None if the rank is open.
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
        sizes.append(axis.dim_param or (int(axis.dim_value) if axis.HasField("dim_value") else DYNAMIC))
    return GraphInput(value.name, dtype, tuple(sizes))


def _dtype(kind: int) -> np.dtype[Any] | None:
    """Returns the numpy dtype of an ONNX element type; None for strings, unknown and undefined ones."""
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    except (KeyError, ValueError, TypeError):
        return None
    return None if dtype.kind in "OSU" else dtype
