"""A graph whose run by a direct call names the op that fails, with its source line.

A file has MegEngine's own class in its place, so that ``megengine.load`` reads it without qtrace.
"""

from __future__ import annotations

from typing import Any

from megengine.core._imperative_rt.core2 import is_tracing_module
from megengine.jit.tracing import is_tracing
from megengine.traced_module import TracedModule
from megengine.traced_module.traced_module import InternalGraph

from qtrace.graph.interpreter import ENGINE_ERRORS, locate_failure_of

__all__ = ["LocatedGraph", "name_failures"]


class LocatedGraph(InternalGraph):
    """MegEngine's graph, whose errors have the node of the op that failed and its source line."""

    def interpret(self, *inputs: Any) -> Any:
        """Runs the graph on the module and the tensors that ``inputs`` holds."""
        try:
            return super().interpret(*inputs)
        except ENGINE_ERRORS as error:
            if isinstance(inputs[0], TracedModule) and not (is_tracing_module() or is_tracing()):
                problem = locate_failure_of(self, inputs)
                if problem:
                    error.args = (problem,)
            raise

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that pickle writes: MegEngine's own."""
        return InternalGraph

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the graph as one of MegEngine's own class."""
        function, arguments, *rest = super().__reduce_ex__(protocol)
        return function, tuple(InternalGraph if a is LocatedGraph else a for a in arguments), *rest

    def __deepcopy__(self, memo: dict[int, Any]) -> InternalGraph:
        """Copies the graph; the copy names failures, too."""
        result = super().__deepcopy__(memo)
        _locate(result)
        return result


def _locate(graph: InternalGraph) -> None:
    if type(graph) is InternalGraph:
        graph.__class__ = LocatedGraph


def name_failures(traced: TracedModule) -> None:
    """Makes errors of a direct call of ``traced`` name the op that fails; the graph stays the same object."""
    for graph in traced.argdef_graph_map.values():
        _locate(graph)
