"""MegEngine's graph as its documents describe it: errors name the op, lookups find what was traced.

A file has MegEngine's own class in its place, so that ``megengine.load`` reads it without qtrace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megengine.core._imperative_rt.core2 import is_tracing_module
from megengine.jit.tracing import is_tracing
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr
from megengine.traced_module.traced_module import ExprFilter, ExprFilterCallFunction, InternalGraph

from qtrace.gradients import plain
from qtrace.graph.interpreter import ENGINE_ERRORS, locate_failure_of

__all__ = ["LocatedGraph", "name_failures"]


class LocatedGraph(InternalGraph):
    """MegEngine's graph, whose errors have the node of the op that failed and its source line.

    A lookup of ``F.conv2d`` finds the convolutions of a prepared graph, which have gradients of qtrace's.
    """

    def exprs(self, recursive: bool = True) -> ExprFilter:
        """Returns the exprs, to be filtered; also the exprs of submodules, unless ``recursive`` is False."""
        return _Exprs(super().exprs(recursive))

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


class _Exprs(ExprFilter):
    def call_function(self, func: Callable[..., Any] | None) -> ExprFilterCallFunction:
        return _Calls(self, func)


class _Calls(ExprFilterCallFunction):
    def __iter__(self) -> Iterator[Expr]:
        wanted = None if self.func is None else plain(self.func)
        calls = ExprFilterCallFunction(self._iter)
        return (call for call in calls if wanted is None or plain(call.func) == wanted)


def _locate(graph: InternalGraph) -> None:
    if type(graph) is InternalGraph:
        graph.__class__ = LocatedGraph


def name_failures(traced: TracedModule) -> None:
    """Makes errors of a direct call of ``traced`` name the op that fails; the graph stays the same object."""
    for graph in traced.argdef_graph_map.values():
        _locate(graph)
