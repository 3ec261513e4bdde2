"""MSCGraph as data: tensors, nodes that know their parents and children, and the graph that finds them.

The names of classes, attributes and methods are those of MSC's own Python classes
(``tvm.contrib.msc.core.ir.graph``), so that code which reads graphs there reads them here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.display import Displayed
from qtrace.errors import DataError, GraphError
from qtrace.graph.msc import listing
from qtrace.graph.msc.schema import parse
from qtrace.storage.files import replacing

__all__ = ["BLOCK", "MSCGraph", "MSCNode", "MSCPrim", "MSCTensor"]

BLOCK = "block"
"""The scope of what a function computes in its own body; MSC's documents have no key for scopes."""

_ENDS = ("input", "constant")  # the types of nodes that have no scope


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
            raise GraphError(f"tensor {self} has no axis {axis!r}.")
        return self.shape[position]

    def __str__(self) -> str:
        return listing.tensor_text(self)


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
                f"node {self.name} has no weight {kind!r}, but {', '.join(self.weights) or 'none'}."
            )
        return self.weights[kind]

    def weight_type(self, name: str) -> str:
        """Returns the type of the weight called ``name``.

        Raises:
            GraphError: when the node has no such weight.
        """
        for kind, weight in self.weights.items():
            if weight.name == name:
                return kind
        raise GraphError(f"node {self.name} has no weight of the name {name!r}.")

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
        return listing.node_text(self)


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
        return listing.prim_text(self)


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
            raise GraphError(f"MSCGraph {self.name} has no node {name!r}.")
        return self._nodes[name]

    def find_prim(self, name: str) -> MSCPrim:
        """Returns the prim ``name``.

        Raises:
            GraphError: when there is none.
        """
        for prim in self.prims:
            if prim.name == name:
                return prim
        raise GraphError(f"MSCGraph {self.name} has no prim {name!r}.")

    def find_tensor(self, name: str) -> MSCTensor:
        """Returns the tensor or weight with a name or alias; the first output for the name of a node.

        Raises:
            GraphError: when there is none.
        """
        if name not in self._tensors:
            raise GraphError(f"MSCGraph {self.name} has no tensor or weight {name!r}.")
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
            graph = _read_graph(parse(text), values or {})
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
        text = listing.prototxt(self)
        if path is not None:
            try:
                with replacing(Path(path)) as (file,):
                    file.write(text.encode())
            except OSError as error:
                raise GraphError(f"{path} cannot be written: {error.strerror or error}.") from error
        return text

    def __str__(self) -> str:
        return listing.graph_text(self)

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
        "outputs": [_tensor_document(tensor) for tensor in node.outputs],
        "attrs": attrs,
        "weights": {kind: _tensor_document(tensor) for kind, tensor in node.weights.items()},
    }


def _tensor_document(tensor: MSCTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "alias": tensor.alias,
        "dtype": tensor.dtype,
        "layout": tensor.layout,
        "shape": tensor.shape,
        "prims": tensor.prims,
    }


def _prim_document(prim: MSCPrim) -> dict[str, Any]:
    parents = [parent.name for parent in prim.parents]
    return {
        "index": prim.index,
        "name": prim.name,
        "optype": prim.optype,
        "parents": parents,
        "attrs": dict(prim.attrs),
    }


def _read_graph(document: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> MSCGraph:
    """Makes the objects of a document that `parse` has checked."""
    nodes: dict[str, MSCNode] = {}
    tensors: dict[str, MSCTensor] = {}
    for item in document["nodes"]:
        outputs = tuple(MSCTensor(**tensor) for tensor in item["outputs"])
        attrs = dict(item["attrs"])
        scope = attrs.pop("scope", None)
        nodes[item["name"]] = MSCNode(
            item["index"],
            item["name"],
            item["shared_ref"],
            item["optype"],
            tuple(nodes[name] for name in item["parents"]),
            tuple(tensors[name] for name in item["inputs"]),
            outputs,
            attrs,
            {kind: MSCTensor(**tensor) for kind, tensor in item["weights"].items()},
            default_scope(item["optype"]) if scope is None else tuple(p for p in scope.split(".") if p),
        )
        tensors.update((tensor.name, tensor) for tensor in outputs)
    prims: dict[str, MSCPrim] = {}
    for item in document["prims"]:
        parents = tuple(prims[name] for name in item["parents"])
        prims[item["name"]] = MSCPrim(item["index"], item["name"], item["optype"], parents, item["attrs"])
    takes, gives = tuple(document["inputs"]), tuple(document["outputs"])
    return MSCGraph(document["name"], takes, gives, tuple(nodes.values()), tuple(prims.values()), values)


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
