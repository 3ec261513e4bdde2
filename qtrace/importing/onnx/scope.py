"""The values that the nodes of a graph see, and what runs the graph of a control flow node's body."""

from __future__ import annotations

from typing import Protocol

import onnx

from qtrace.errors import ImportingError
from qtrace.graph.builder import GraphBuilder
from qtrace.importing.onnx.layers import Layers
from qtrace.importing.onnx.model import Graph
from qtrace.importing.onnx.values import Value

__all__ = ["GraphRunner", "Scope"]


class Scope:
    """The values that a graph sees: its own, and the values of the graph around it.

    Args:
        values: the values of its inputs and initializers by name.
        outer: the scope around it, for the body of a control flow node.
    """

    def __init__(self, values: dict[str, Value], outer: Scope | None = None) -> None:
        self.values = values
        self.outer = outer

    def __getitem__(self, name: str) -> Value:
        if name in self.values:
            return self.values[name]
        if self.outer is None:
            raise ImportingError(f"{name!r} is read before a node computes it: the file is damaged.")
        return self.outer[name]

    def inner(self, values: dict[str, Value]) -> Scope:
        """Returns the scope of a body inside of this graph."""
        return Scope(values, self)


class GraphRunner(Protocol):
    """What adds the nodes of a graph to the traced graph, for a body that is run once or several times.

    Attributes:
        builder: the graph that is built.
        layers: its layers and parameters.
        written: how many nodes its loops have written out.
    """

    builder: GraphBuilder
    layers: Layers
    written: int

    def subgraph(self, proto: onnx.GraphProto) -> Graph:
        """Reads the body of a control flow node."""

    def run(self, graph: Graph, scope: Scope) -> list[Value]:
        """Adds all nodes of ``graph``; returns what its outputs stand for."""
