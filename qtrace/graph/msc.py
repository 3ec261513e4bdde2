"""MSCGraph, the graph document of TVM's multi-system compiler, as data: read from files, found by name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import DataError, GraphError
from qtrace.storage.archives import unpack_arrays

__all__ = ["MSCGraph", "MSCNode", "MSCTensor", "from_msc"]


@dataclass(frozen=True)
class MSCTensor:
    """A tensor of an MSCGraph.

    Attributes:
        name: ``NODE:INDEX``, or the name of a weight.
        alias: another name of the tensor; "" if it has none.
        dtype: the type, such as ``float32``.
        layout: one letter an axis, such as ``NCHW``; "" if it is not known.
        shape: the sizes; -1 for a free one.
        prims: the names of the sizes, which qtrace does not write.
    """

    name: str
    alias: str
    dtype: str
    layout: str
    shape: tuple[int, ...]
    prims: tuple[str, ...] = ()


@dataclass(frozen=True)
class MSCNode:
    """An op of an MSCGraph.

    Attributes:
        index: its position.
        name: its name.
        shared_ref: the node whose weights it uses; "" for its own.
        optype: the type of the op, such as ``nn.relu``.
        parents: the names of the nodes that it reads.
        inputs: the names of the tensors that it reads.
        outputs: the tensors that it gives.
        attrs: its arguments as text.
        weights: role -> weight.
    """

    index: int
    name: str
    shared_ref: str
    optype: str
    parents: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[MSCTensor, ...]
    attrs: Mapping[str, str]
    weights: Mapping[str, MSCTensor]


@dataclass(frozen=True, eq=False)
class MSCGraph:
    """An MSCGraph with the values of its weights.

    Attributes:
        name: the name of the graph.
        inputs: the names of the tensors that it takes.
        outputs: the names of the tensors that it gives.
        nodes: the ops in order.
        prims: the sizes with names, which qtrace does not write, as they are in the document.
        values: name of a weight -> its value.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[MSCNode, ...]
    prims: tuple[Any, ...] = ()
    values: Mapping[str, np.ndarray] = field(default_factory=dict)

    def find_node(self, name: str) -> MSCNode:
        """Returns the node ``name``.

        Raises:
            GraphError: when there is none.
        """
        if name not in self._nodes:
            raise GraphError(f"MSCGraph {self.name} has no node {name!r}.")
        return self._nodes[name]

    def find_tensor(self, name: str) -> MSCTensor:
        """Returns the tensor or weight with the name or alias ``name``.

        Raises:
            GraphError: when there is none.
        """
        if name not in self._tensors:
            raise GraphError(f"MSCGraph {self.name} has no tensor or weight {name!r}.")
        return self._tensors[name][0]

    def find_producer(self, name: str) -> MSCNode:
        """Returns the node that gives a tensor, or the first one that holds a weight, by name or alias.

        Raises:
            GraphError: when there is no such tensor.
        """
        self.find_tensor(name)
        return self._tensors[name][1]

    def find_consumers(self, name: str) -> tuple[MSCNode, ...]:
        """Returns the nodes that read a tensor or hold a weight, by name or alias, in order.

        Raises:
            GraphError: when there is no such tensor.
        """
        return self._consumers.get(self.find_tensor(name).name, ())

    def to_json(self) -> str:
        """Returns the JSON document."""
        document = {
            "name": self.name,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "nodes": [asdict(node) for node in self.nodes],
            "prims": self.prims,
        }
        return f"{json.dumps(document, indent=1)}\n"

    @cached_property
    def _nodes(self) -> dict[str, MSCNode]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _tensors(self) -> dict[str, tuple[MSCTensor, MSCNode]]:
        table: dict[str, tuple[MSCTensor, MSCNode]] = {}
        for node in self.nodes:
            tensors = (*node.outputs, *node.weights.values())
            names = [(t.name, t) for t in tensors] + [(t.alias, t) for t in tensors if t.alias]
            for name, tensor in names:
                table.setdefault(name, (tensor, node))
        return table

    @cached_property
    def _consumers(self) -> dict[str, tuple[MSCNode, ...]]:
        readers: dict[str, dict[str, MSCNode]] = {}
        for node in self.nodes:
            for name in (*node.inputs, *(t.name for t in node.weights.values())):
                readers.setdefault(name, {})[node.name] = node
        return {name: tuple(nodes.values()) for name, nodes in readers.items()}


def from_msc(path: str | os.PathLike[str]) -> MSCGraph:
    """Reads an MSCGraph: the JSON document, and the values of weights from the ``.npz`` file beside it.

    Args:
        path: the JSON document. A document without ``.npz`` has no values.

    Raises:
        DataError: when a file is missing, damaged, or no MSCGraph.
    """
    source = Path(path)
    try:
        document = json.loads(source.read_text(encoding="utf-8"))
        nodes = tuple(_read_node(node) for node in document["nodes"])
        graph = MSCGraph(
            str(document["name"]),
            tuple(document["inputs"]),
            tuple(document["outputs"]),
            nodes,
            tuple(document["prims"]),
            _read_values(source.with_suffix(".npz")),
        )
        _check(graph)
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, EOFError) as error:
        raise DataError(f"{path} is no MSCGraph, or damaged ({type(error).__name__}: {error}).") from error
    except GraphError as error:
        raise DataError(f"{path} is damaged: {error}") from error
    return graph


def _read_values(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    try:
        return unpack_arrays(path.read_bytes())
    except ValueError as error:
        raise GraphError(f"{path.name}, with the values of its weights, cannot be read ({error}).") from error


def _read_node(node: Mapping[str, Any]) -> MSCNode:
    return MSCNode(
        int(node["index"]),
        str(node["name"]),
        str(node["shared_ref"]),
        str(node["optype"]),
        tuple(node["parents"]),
        tuple(node["inputs"]),
        tuple(_read_tensor(tensor) for tensor in node["outputs"]),
        {str(key): str(value) for key, value in node["attrs"].items()},
        {str(key): _read_tensor(tensor) for key, tensor in node["weights"].items()},
    )


def _read_tensor(tensor: Mapping[str, Any]) -> MSCTensor:
    name, alias, dtype, layout = (str(tensor[key]) for key in ("name", "alias", "dtype", "layout"))
    return MSCTensor(
        name, alias, dtype, layout, tuple(int(n) for n in tensor["shape"]), tuple(tensor["prims"])
    )


def _check(graph: MSCGraph) -> None:
    """Refuses a document whose nodes read what no earlier node gives, or whose weights have other shapes."""
    given: set[str] = set()
    for node in graph.nodes:
        missing = [name for name in node.inputs if name not in given]
        if missing:
            raise GraphError(f"node {node.name} reads {missing[0]}, which no earlier node gives.")
        given.update(tensor.name for tensor in node.outputs)
        for weight in node.weights.values():
            value = graph.values.get(weight.name)
            if value is not None and value.shape != weight.shape:
                raise GraphError(
                    f"weight {weight.name} of node {node.name} has shape {list(weight.shape)}, and its value "
                    f"{list(value.shape)}."
                )
    for name in (*graph.inputs, *graph.outputs):
        graph.find_tensor(name)
