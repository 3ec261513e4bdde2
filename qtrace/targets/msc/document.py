"""MSCGraph as data: tensors, nodes that know their parents and children, and the graph that finds them.

The names of classes, attributes and methods follow MSC's own Python classes
(``tvm.contrib.msc.core.ir.graph``), so that code which reads graphs there reads them here. So are the listing
and the prototxt by MSC's printers, even the word ``CHILDERN``. A document is data from anywhere:
what is wrong with it is one sentence that names the node and the key. Nothing in it is resolved or run here.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qtrace.display import Displayed
from qtrace.errors import DataError, GraphError
from qtrace.plugins.options import check_arguments
from qtrace.storage.checkpoints import unpack_arrays
from qtrace.storage.files import replacing
from qtrace.storage.outputs import WRITTEN

# MSC lists attributes in the order of a hash table: this is its order for a convolution. Others follow.
_ORDER = "out_dtype strides kernel_layout groups padding data_layout dilation out_layout"
_FIRST = {key: position for position, key in enumerate(_ORDER.split())}


def _head(letter: str, member: Any, shared_ref: str) -> str:
    shared = f"(M: {shared_ref})" if shared_ref else ""
    parents, children = (",".join(m.name for m in each) for each in (member.parents, member.children))
    return f"{letter}_{member.index} {member.name}{shared} <PARENTS: {parents}| CHILDERN: {children}>"


def _pairs(attrs: Mapping[str, str]) -> str:
    ordered = sorted(attrs.items(), key=lambda pair: _FIRST.get(pair[0], len(_FIRST)))
    return "".join(f"{key}={text} " for key, text in ordered)


def prototxt(graph: MSCGraph) -> str:
    """Writes the nodes as layers: viewers show bottoms and tops as edges, ``layer_param`` as a table."""
    lines = [f"# {WRITTEN}.", f"name: {_quoted(graph.name)}"]
    for node in graph.nodes:
        kind = node.optype.replace(".", "_")
        lines += ["layer {", f"  name: {_quoted(node.name)}", f"  type: {_quoted(kind)}"]
        lines.append(f"  top: {_quoted(node.name)}")
        lines += [f"  bottom: {_quoted(parent.name)}" for parent in node.parents]
        lines += ["  layer_param {", f"    idx: {node.index}"]
        rows = [(f"input_{i}", str(t)) for i, t in enumerate(node.inputs)]
        rows += [(f"output_{i}", str(t)) for i, t in enumerate(node.outputs)]
        rows += [(f"param_{key}", str(t)) for key, t in node.weights.items()]
        rows += list(node.attrs.items())
        lines += [f"    {key}: {_quoted(text)}" for key, text in rows]
        lines += ["  }", "}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text)


_LARGEST_SIZE = int(np.iinfo(np.int64).max)


class _Fields:
    """The values of an object, held to types when they are read."""

    def __init__(self, item: Any, about: str) -> None:
        if not isinstance(item, dict):
            raise GraphError(f"{about} is {reprlib.repr(item)}, not an object")
        self.item, self.about = item, about

    def get(self, key: str, kind: type, items: type | None = None, default: Any = None) -> Any:
        """Returns a value.

        Args:
            key: its key.
            kind: its type.
            items: the type of its items; None for any.
            default: what is meant where there is none; None if there must be one.

        Raises:
            GraphError: when it is missing, or of another type; the message is a clause.
        """
        value = self.item.get(key, default)
        if value is None and key not in self.item:
            raise GraphError(f"{self.about} lacks {key!r}")
        self._check(value, kind, f"has the {key} {reprlib.repr(value)}")
        if items is not None:
            for item in value.values() if kind is dict else value:
                self._check(item, items, f"has {reprlib.repr(item)} in its {key}")
        return value

    def _check(self, value: Any, kind: type, problem: str) -> None:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise GraphError(f"{self.about} {problem}: it must be {_KINDS[kind]}")


# Key of a tensor -> what is meant without it; None if it must be there.
_TENSOR = {"name": None, "alias": "", "dtype": None, "layout": ""}
_Member = TypeVar("_Member", "MSCNode", "MSCPrim")
_KINDS = {str: "text", int: "an integer", list: "a list", dict: "an object"}


BLOCK = "block"
"""The scope of what a function computes in its own body; MSC's documents lack a key for scopes."""

_ENDS = ("input", "constant")  # the types of nodes without a scope


@dataclass(frozen=True)
class MSCTensor:
    """A tensor of an MSCGraph. ``str()`` gives it as listings do: ``x:0(x)<1,3,4,4|float32|NCHW>``.

    Attributes:
        name: ``NODE:INDEX``, or the name of a weight.
        alias: the name of an input or output of the graph; "" for other tensors.
        dtype: the type, such as ``float32``.
        layout: one letter an axis, such as ``NCHW``; "" if it is not known.
        shape: the sizes; -1 for an open one.
        prims: the size of each axis as a number or the name of a prim; () if no axis is open.
    """

    name: str
    alias: str
    dtype: str
    layout: str
    shape: tuple[int, ...]
    prims: tuple[str, ...] = ()

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def dtype_name(self) -> str:
        """The type, such as ``float32``."""
        return self.dtype

    def get_shape(self, with_prims: bool = False) -> list[int | str]:
        """Returns the sizes; with prims, the name of a prim in the place of -1."""
        if not with_prims or not self.prims:
            return list(self.shape)
        return [int(p) if p.isdecimal() else p for p in self.prims]

    def get_size(self) -> int:
        """Returns the number of values; negative or 0 if an axis is open or empty."""
        return math.prod(self.shape)

    def layout_of(self, axis: str) -> int:
        """Returns the position of a letter of the layout; -1 if there is none."""
        return self.layout.find(axis) if axis else -1

    def dim_at(self, axis: int | str) -> int:
        """Returns the size of an axis, by position or by its letter in the layout.

        Raises:
            GraphError: when there is no such axis.
        """
        position = self.layout_of(axis) if isinstance(axis, str) else axis
        if (isinstance(axis, str) and position < 0) or not -self.ndim <= position < self.ndim:
            raise GraphError(f"tensor {self} lacks axis {axis!r}.")
        return self.shape[position]

    def __str__(self) -> str:
        alias = f"({self.alias})" if self.alias else ""
        sizes = ",".join(map(str, self.shape))
        layout = f"|{self.layout}" if self.layout else ""
        return f"{self.name}{alias}<{sizes}{'|' if self.shape else ''}{self.dtype}{layout}>"


@dataclass(frozen=True, eq=False)
class MSCNode:
    """An op of an MSCGraph. ``str()`` lists it as MSC does.

    Attributes:
        index: its position.
        name: its name.
        shared_ref: the first node that uses its weights; "" if that is this node.
        optype: the type of the op, such as ``nn.relu``.
        parents: the nodes that it reads.
        inputs: the tensors that it reads.
        outputs: the tensors that it gives.
        attrs: its arguments as text.
        weights: type of a weight, such as ``weight`` or ``gamma`` -> the weight.
        scope: the parts of its scope: ``block``, then the path of the module in whose ``forward`` it is; ()
            for inputs and constants.
        children: the nodes that read it, once the graph is made.
    """

    index: int
    name: str
    shared_ref: str
    optype: str
    parents: tuple[MSCNode, ...] = field(repr=False)
    inputs: tuple[MSCTensor, ...]
    outputs: tuple[MSCTensor, ...]
    attrs: Mapping[str, str]
    weights: Mapping[str, MSCTensor]
    scope: tuple[str, ...] = ()
    children: tuple[MSCNode, ...] = field(default=(), init=False, repr=False)

    def input_at(self, index: int) -> MSCTensor:
        """Returns the tensor at a position of the inputs.

        Raises:
            GraphError: when there is none.
        """
        return _at(self.inputs, index, f"node {self.name} has {len(self.inputs)} inputs")

    def output_at(self, index: int) -> MSCTensor:
        """Returns the tensor at a position of the outputs.

        Raises:
            GraphError: when there is none.
        """
        return _at(self.outputs, index, f"node {self.name} has {len(self.outputs)} outputs")

    def weight_at(self, kind: str) -> MSCTensor:
        """Returns the weight of a type, such as ``gamma``.

        Raises:
            GraphError: when there is none.
        """
        if kind not in self.weights:
            raise GraphError(
                f"node {self.name} holds no weight {kind!r}, but {', '.join(self.weights) or 'none'}."
            )
        return self.weights[kind]

    def weight_type(self, name: str) -> str:
        """Returns the type of the weight called ``name``.

        Raises:
            GraphError: when the node lacks the weight.
        """
        for kind, weight in self.weights.items():
            if weight.name == name:
                return kind
        raise GraphError(f"node {self.name} lacks the weight {name!r}.")

    def get_inputs(self) -> tuple[MSCTensor, ...]:
        """Returns the tensors that the node reads."""
        return self.inputs

    def get_outputs(self) -> tuple[MSCTensor, ...]:
        """Returns the tensors that the node gives."""
        return self.outputs

    def get_weights(self) -> dict[str, MSCTensor]:
        """Returns type of a weight -> weight."""
        return dict(self.weights)

    def get_attrs(self) -> dict[str, str]:
        """Returns the arguments as text."""
        return dict(self.attrs)

    def get_attr(self, key: str, default: str | None = None) -> str | None:
        """Returns an argument as text; ``default`` if there is none."""
        return self.attrs.get(key, default)

    def has_attr(self, key: str) -> bool:
        """Returns whether there is an argument ``key``."""
        return key in self.attrs

    def __str__(self) -> str:
        lines = [_head("N", self, self.shared_ref)]
        if self.inputs:
            lines.append(f"  IN: {','.join(map(str, self.inputs))}")
        lines += [f"  OUT: {','.join(map(str, self.outputs))}", f"  OPTYPE: {self.optype}"]
        if self.scope:
            lines.append(f"  SCOPE: {'.'.join(self.scope)}")
        if self.attrs:
            lines.append(f"  ATTRS: {_pairs(self.attrs)}")
        if self.weights:
            lines.append("  WEIGHTS: ")
            lines += [f"    {kind}: {tensor}" for kind, tensor in self.weights.items()]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, eq=False)
class MSCPrim:
    """A size of an MSCGraph: an open axis, a number, or what the graph computes from them.

    Attributes:
        index: its position.
        name: its name, which the prims of tensors refer to.
        optype: ``shape`` for the size of an axis, ``Int`` for a number, ``Add``, ``Mul`` and so on.
        parents: the prims that it is computed from.
        attrs: of a shape, ``producer`` (a node), ``out_idx`` and ``dim``; of a number, ``value``.
        children: the prims that are computed from it, once the graph is made.
    """

    index: int
    name: str
    optype: str
    parents: tuple[MSCPrim, ...] = field(repr=False)
    attrs: Mapping[str, str]
    children: tuple[MSCPrim, ...] = field(default=(), init=False, repr=False)

    def __str__(self) -> str:
        lines = [_head("P", self, ""), f"  OPTYPE: {self.optype}"]
        if self.attrs:
            lines.append(f"  ATTRS: {_pairs(self.attrs)}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, eq=False, repr=False)
class MSCGraph(Displayed):
    """An MSCGraph with the values of its weights. ``print(graph)`` lists it as MSC does.

    Attributes:
        name: the name of the graph.
        inputs: the names of the tensors that it takes.
        outputs: the names of the tensors that it gives.
        nodes: the ops in order.
        prims: the sizes in order: open axes, and what is computed from them.
        values: name of a weight -> its value.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[MSCNode, ...]
    prims: tuple[MSCPrim, ...] = ()
    values: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)

    def _text(self, max_width: int | None) -> str:
        return str(self)

    def __post_init__(self) -> None:
        for members in (self.nodes, self.prims):
            children: dict[Any, dict[Any, None]] = {member: {} for member in members}
            for member in members:
                for parent in member.parents:
                    children[parent][member] = None
            for member, readers in children.items():
                object.__setattr__(member, "children", tuple(readers))

    def get_nodes(self) -> tuple[MSCNode, ...]:
        """Returns the nodes in order."""
        return self.nodes

    def get_prims(self) -> tuple[MSCPrim, ...]:
        """Returns the prims in order."""
        return self.prims

    def get_inputs(self) -> tuple[MSCTensor, ...]:
        """Returns the tensors that the graph takes."""
        return tuple(self.find_tensor(name) for name in self.inputs)

    def get_outputs(self) -> tuple[MSCTensor, ...]:
        """Returns the tensors that the graph gives."""
        return tuple(self.find_tensor(name) for name in self.outputs)

    def get_weights(self) -> tuple[MSCTensor, ...]:
        """Returns the weights of all nodes, each once."""
        return tuple({t.name: t for node in self.nodes for t in node.weights.values()}.values())

    def get_tensors(self) -> tuple[MSCTensor, ...]:
        """Returns the outputs and weights of all nodes, each once."""
        tensors = {t.name: t for node in self.nodes for t in (*node.outputs, *node.weights.values())}
        return tuple(tensors.values())

    def input_at(self, index: int) -> MSCTensor:
        """Returns the tensor at a position of the graph's inputs.

        Raises:
            GraphError: when there is none.
        """
        return _at(self.get_inputs(), index, f"MSCGraph {self.name} has {len(self.inputs)} inputs")

    def output_at(self, index: int) -> MSCTensor:
        """Returns the tensor at a position of the graph's outputs.

        Raises:
            GraphError: when there is none.
        """
        return _at(self.get_outputs(), index, f"MSCGraph {self.name} has {len(self.outputs)} outputs")

    def has_node(self, name: str) -> bool:
        """Returns whether there is a node ``name``."""
        return name in self._nodes

    def has_tensor(self, name: str) -> bool:
        """Returns whether there is a tensor or weight ``name``; see `find_tensor`."""
        return name in self._tensors

    def find_node(self, name: str) -> MSCNode:
        """Returns the node ``name``.

        Raises:
            GraphError: when there is none.
        """
        if name not in self._nodes:
            raise GraphError(f"MSCGraph {self.name} holds no node {name!r}.")
        return self._nodes[name]

    def find_prim(self, name: str) -> MSCPrim:
        """Returns the prim ``name``.

        Raises:
            GraphError: when there is none.
        """
        for prim in self.prims:
            if prim.name == name:
                return prim
        raise GraphError(f"MSCGraph {self.name} holds no prim {name!r}.")

    def find_tensor(self, name: str) -> MSCTensor:
        """Returns the tensor or weight with a name or alias; the first output for the name of a node.

        Raises:
            GraphError: when there is none.
        """
        if name not in self._tensors:
            raise GraphError(f"MSCGraph {self.name} holds no tensor or weight {name!r}.")
        return self._tensors[name][0]

    def find_producer(self, ref: str | MSCTensor) -> MSCNode:
        """Returns the node that gives a tensor, or the first one that holds a weight.

        Args:
            ref: the tensor, or its name as in `find_tensor`.

        Raises:
            GraphError: when there is no such tensor.
        """
        name = ref.name if isinstance(ref, MSCTensor) else ref
        self.find_tensor(name)
        return self._tensors[name][1]

    def find_consumers(self, ref: str | MSCTensor) -> tuple[MSCNode, ...]:
        """Returns the nodes that read a tensor or hold a weight, in order.

        Args:
            ref: the tensor, or its name as in `find_tensor`.

        Raises:
            GraphError: when there is no such tensor.
        """
        name = ref.name if isinstance(ref, MSCTensor) else ref
        return self._consumers.get(self.find_tensor(name).name, ())

    def to_json(self) -> str:
        """Returns the JSON document, without the values of weights."""
        document = {
            "name": self.name,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "nodes": [_node_document(node) for node in self.nodes],
            "prims": [_prim_document(prim) for prim in self.prims],
        }
        return f"{json.dumps(document, indent=1)}\n"

    @classmethod
    def from_json(
        cls, text: str, values: Mapping[str, np.ndarray] | None = None, source: str = "the text"
    ) -> MSCGraph:
        """Reads a JSON document.

        Args:
            text: the document: of qtrace, or one of MSC's own.
            values: name of a weight -> its value.
            source: what the document is called in errors.

        Raises:
            DataError: when the text is no MSCGraph, or a value has another shape than its weight.
        """
        if not isinstance(text, str):
            raise DataError(f"from_json takes the text of a document, not a {type(text).__name__}.")
        try:
            graph = _Reader().read(text, values or {})
            _check_values(graph)
            for name in (*graph.inputs, *graph.outputs):
                graph.find_tensor(name)
        except GraphError as error:
            reason = str(error).rstrip(".")
            raise DataError(f"{source} is no MSCGraph, or damaged: {reason}.") from error
        return graph

    def visualize(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the graph as a prototxt, which viewers of Caffe's networks show.

        Args:
            path: a file to write it to; None for none.

        Raises:
            GraphError: when the file cannot be written.
        """
        text = prototxt(self)
        if path is not None:
            try:
                with replacing(Path(path)) as (file,):
                    file.write(text.encode())
            except OSError as error:
                raise GraphError(f"{path} cannot be written: {error.strerror or error}.") from error
        return text

    def __str__(self) -> str:
        inputs, outputs = ",".join(self.inputs), ",".join(self.outputs)
        paragraphs = "".join(f"{member}\n" for member in (*self.prims, *self.nodes))
        return f"{self.name} <INPUTS: {inputs}| OUTPUTS: {outputs}>\n{paragraphs}"

    @cached_property
    def _nodes(self) -> dict[str, MSCNode]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _tensors(self) -> dict[str, tuple[MSCTensor, MSCNode]]:
        table: dict[str, tuple[MSCTensor, MSCNode]] = {}
        for node in self.nodes:
            table.update((t.name, (t, node)) for t in node.outputs)
        for node in self.nodes:
            for tensor in node.weights.values():
                table.setdefault(tensor.name, (tensor, node))
        for node in self.nodes:  # names go before aliases, and both before the names of nodes
            for tensor in (*node.outputs, *node.weights.values()):
                table.setdefault(tensor.alias or tensor.name, (tensor, node))
        for node in self.nodes:
            if node.outputs:
                table.setdefault(node.name, (node.outputs[0], node))
        return table

    @cached_property
    def _consumers(self) -> dict[str, tuple[MSCNode, ...]]:
        readers: dict[str, dict[MSCNode, None]] = {}
        for node in self.nodes:
            for tensor in (*node.inputs, *node.weights.values()):
                readers.setdefault(tensor.name, {})[node] = None
        return {name: tuple(nodes) for name, nodes in readers.items()}


def _at(tensors: tuple[MSCTensor, ...], index: int, about: str) -> MSCTensor:
    if not -len(tensors) <= index < len(tensors):
        raise GraphError(f"{about}: there is none at {index}.")
    return tensors[index]


def default_scope(optype: str) -> tuple[str, ...]:
    """Returns the scope of a node of which a document says nothing."""
    return () if optype in _ENDS else (BLOCK,)


def _node_document(node: MSCNode) -> dict[str, Any]:
    attrs = dict(node.attrs)
    if node.scope != default_scope(node.optype):
        attrs["scope"] = ".".join(node.scope)
    return {
        "index": node.index,
        "name": node.name,
        "shared_ref": node.shared_ref,
        "optype": node.optype,
        "parents": [parent.name for parent in node.parents],
        "inputs": [tensor.name for tensor in node.inputs],
        "outputs": list(map(asdict, node.outputs)),
        "attrs": attrs,
        "weights": {kind: asdict(tensor) for kind, tensor in node.weights.items()},
    }


def _prim_document(prim: MSCPrim) -> dict[str, Any]:
    own = {key: getattr(prim, key) for key in ("index", "name", "optype")}
    return {**own, "parents": [parent.name for parent in prim.parents], "attrs": dict(prim.attrs)}


class _Reader:
    """Reads a document: each node and prim knows the earlier ones only, so there is no cycle.

    Keys that MSC's own reader does not need may be missing: ``alias``, ``layout``, ``prims``, ``shared_ref``.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, MSCNode] = {}
        self.prims: dict[str, MSCPrim] = {}
        self.tensors: dict[str, tuple[MSCTensor, str]] = {}  # name -> the tensor, and the node that gives it

    def read(self, text: str, values: Mapping[str, np.ndarray]) -> MSCGraph:
        """Reads a document.

        Raises:
            GraphError: when it is no MSCGraph; the message is a clause.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise GraphError(f"it is no JSON ({type(error).__name__})") from error
        if not isinstance(document, dict):
            raise GraphError(f"it is a {type(document).__name__}, not an object")
        graph = _Fields(document, "the graph")
        name, inputs, outputs = (
            graph.get("name", str),
            graph.get("inputs", list, str),
            graph.get("outputs", list, str),
        )
        for i, item in enumerate(graph.get("prims", list, default=[])):
            self._read_prim(_Fields(item, f"prim {i}"))
        for i, item in enumerate(graph.get("nodes", list)):
            self._read_node(_Fields(item, f"node {i}"))
        members = tuple(self.nodes.values()), tuple(self.prims.values())
        return MSCGraph(name, tuple(inputs), tuple(outputs), *members, values)

    def _read_prim(self, fields: _Fields) -> None:
        name = fields.get("name", str)
        parents = _earlier(f"prim {name}", fields.get("parents", list, str, []), self.prims)
        attrs = fields.get("attrs", dict, str, {})
        _add(
            self.prims,
            MSCPrim(fields.get("index", int), name, fields.get("optype", str), parents, attrs),
            "prim",
        )

    def _read_node(self, fields: _Fields) -> None:
        name = fields.get("name", str)
        fields.about = about = f"node {reprlib.repr(name)}"
        outputs = [
            self._tensor(t, f"output {i} of {about}") for i, t in enumerate(fields.get("outputs", list))
        ]
        weights = fields.get("weights", dict)
        attrs, optype = dict(fields.get("attrs", dict, str)), fields.get("optype", str)
        scope = attrs.pop("scope", None)
        parents = fields.get("parents", list, str)
        node = MSCNode(
            fields.get("index", int),
            name,
            fields.get("shared_ref", str, default=""),
            optype,
            inputs=tuple(self._read_by(name, parents, key) for key in fields.get("inputs", list, str)),
            parents=_earlier(f"node {name}", parents, self.nodes),
            outputs=tuple(outputs),
            attrs=attrs,
            weights={kind: self._tensor(t, f"weight {kind!r} of {about}") for kind, t in weights.items()},
            scope=default_scope(optype) if scope is None else tuple(p for p in scope.split(".") if p),
        )
        _add(self.nodes, node, "node")
        for tensor in outputs:
            if tensor.name in self.tensors:
                raise GraphError(f"the tensor {tensor.name} is given twice")
            self.tensors[tensor.name] = tensor, name

    def _read_by(self, node: str, parents: Sequence[str], name: str) -> MSCTensor:
        if name not in self.tensors:
            raise GraphError(f"node {node} reads {name}, which no earlier node gives")
        tensor, giver = self.tensors[name]
        if giver not in parents:
            raise GraphError(f"node {node} reads {name}, and {giver} is not among its parents")
        return tensor

    def _tensor(self, item: Any, about: str) -> MSCTensor:
        fields = _Fields(item, about)
        texts = {key: fields.get(key, str, default=default) for key, default in _TENSOR.items()}
        shape, prims = fields.get("shape", list, int), fields.get("prims", list, str, [])
        if any(not -1 <= size <= _LARGEST_SIZE for size in shape):
            raise GraphError(f"{about} has the shape {reprlib.repr(shape)}: a size is -1, 0 or more")
        if len(prims) not in (0, len(shape)):
            raise GraphError(f"{about} has {len(prims)} prims for {len(shape)} axes")
        if unknown := [p for p in prims if not p.isdecimal() and p not in self.prims]:
            raise GraphError(f"{about} names the prim {unknown[0]}, which is not there")
        return MSCTensor(**texts, shape=tuple(shape), prims=tuple(prims))


def _earlier(reader: str, names: Sequence[str], earlier: Mapping[str, _Member]) -> tuple[_Member, ...]:
    if missing := [name for name in names if name not in earlier]:
        raise GraphError(f"{reader} names the parent {missing[0]}, which is no earlier {reader.split()[0]}")
    return tuple(earlier[name] for name in names)


def _add(earlier: dict[str, _Member], member: _Member, sort: str) -> None:
    if member.name in earlier:
        raise GraphError(f"two {sort}s have the name {member.name}")
    earlier[member.name] = member


def _check_values(graph: MSCGraph) -> None:
    """Refuses a value that has another shape than its weight."""
    for node in graph.nodes:
        for weight in node.weights.values():
            value = graph.values.get(weight.name)
            if value is not None and value.shape != weight.shape:
                raise GraphError(
                    f"weight {weight.name} of node {node.name} has shape {list(weight.shape)}, and its value "
                    f"{list(value.shape)}"
                )


@check_arguments
def from_msc(path: str | os.PathLike[str]) -> MSCGraph:
    """Reads an MSCGraph: the JSON document, and the values of weights from the ``.npz`` file next to it.

    Args:
        path: the JSON document. A document without ``.npz`` is without values.

    Raises:
        DataError: when a file is missing, damaged, or no MSCGraph.
    """
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
        values = _read_values(source.with_suffix(".npz"))
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no MSCGraph, or damaged: it is no text.") from error
    return MSCGraph.from_json(text, values, source=str(path))


def _read_values(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    try:
        return unpack_arrays(path.read_bytes())
    except ValueError as error:
        raise DataError(
            f"{path.with_suffix('.json')} is damaged: {path.name}, with the values of its weights, cannot be "
            f"read ({error})."
        ) from error
