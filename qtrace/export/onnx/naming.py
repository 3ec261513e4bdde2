"""The names of nodes and initializers in an ONNX file."""

from __future__ import annotations

from collections import Counter

from qtrace.export.converted.plain_graph import PlainGraph
from qtrace.graph.types import Constant, Expr, GetAttr, Node

__all__ = ["ModuleNames", "OutputNames"]


class OutputNames:
    """Names after tensors: a node after its output, an initializer after the node of the graph."""

    def enter(self, expr: Expr) -> None:
        """Says that the nodes that follow compute ``expr``."""

    def node(self, op: str, output: str) -> str:
        """Returns the name of a new node of type ``op`` whose first output is ``output``."""
        return f"{output}_{op}"

    def initializer(self, source: Node | str) -> str | None:
        """Returns the preferred name of a parameter, given by its node or its path; None if there is none."""
        return None


class ModuleNames(OutputNames):
    """Names after modules, from which an importer builds the modules again.

    The initializer of a parameter has its key in the ``state_dict``, ``backbone.conv.weight``, and a node the
    path of its module and its type, ``/backbone/conv/Conv``, as PyTorch's exporter names them.

    Args:
        graph: the graph that is written.
    """

    def __init__(self, graph: PlainGraph) -> None:
        self._graph = graph
        self._scope = ""
        self._used: set[str] = set()
        self._counts: Counter[str] = Counter()
        stored = (GetAttr, Constant)
        self._tensors = {node.name for node in graph.nodes.values() if not isinstance(node.expr, stored)}
        self._tensors.update(graph.inputs.values())

    def enter(self, expr: Expr) -> None:
        """Says that the nodes that follow compute ``expr``."""
        self._scope = self._graph.scopes[expr]

    def node(self, op: str, output: str) -> str:
        """Returns the name of a new node of type ``op`` in the module of the current expr."""
        parts = [*self._scope.split("."), op] if self._scope else [op]
        name = base = "".join(f"/{part}" for part in parts)
        while name in self._used:
            self._counts[base] += 1
            name = f"{base}_{self._counts[base]}"
        self._used.add(name)
        return name

    def initializer(self, source: Node | str) -> str | None:
        """Returns the key of a parameter in the ``state_dict``, unless a tensor has that name."""
        key = self._graph.parameter_key(source)
        return None if key in self._tensors else key
