"""Unrolls a hierarchical traced graph to one sequence of steps, with a submodule's exprs once per call.

Nothing is copied: a step is an expr of the source with numbers for the values that it reads and gives, for a
dataflow analysis whose result is written back into the hierarchical graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallMethod, Expr, is_call_module
from megengine.traced_module.node import Node
from megengine.traced_module.traced_module import InternalGraph

from qtrace.graph.tracing.views import kernel_name

__all__ = ["ExecutedExpr", "Unrolled"]


@dataclass(frozen=True)
class ExecutedExpr:
    """One execution of an expr.

    Attributes:
        expr: the expr in the source's graph.
        module: the traced module whose graph holds the expr.
        inputs: the values of ``expr.inputs``, as numbers.
        outputs: the values of ``expr.outputs``, as numbers.
        name: the function, method or kernel that ``expr`` calls; see `kernel_name`.
    """

    expr: Expr
    module: TracedModule
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    name: str


class Unrolled:
    """The steps of a traced module in execution order; the steps of a submodule replace its call.

    Attributes:
        steps: all steps.
        inputs: the values of the graph's inputs.
        outputs: the values that the graph returns.

    Args:
        traced: a traced module, flat or hierarchical.
    """

    def __init__(self, traced: TracedModule) -> None:
        self.steps: list[ExecutedExpr] = []
        self._numbers = itertools.count()
        graph = traced.graph
        self.inputs = tuple(next(self._numbers) for _ in graph._inputs)
        self.outputs = self._unroll(traced, graph, self.inputs)

    def _unroll(self, module: TracedModule, graph: InternalGraph, inputs: Sequence[int]) -> tuple[int, ...]:
        numbers: dict[Node, int] = dict(zip(graph._inputs, inputs, strict=True))
        for expr in graph._exprs:
            read = tuple(numbers[node] for node in expr.inputs)
            callee = _traced_callee(expr)
            if callee is None:
                outputs = tuple(next(self._numbers) for _ in expr.outputs)
                self.steps.append(ExecutedExpr(expr, module, read, outputs, kernel_name(expr)))
            else:
                outputs = self._unroll(callee, callee.argdef_graph_map[expr.arg_def], read)
            numbers.update(zip(expr.outputs, outputs, strict=True))
        return tuple(numbers[node] for node in graph._outputs)


def _traced_callee(expr: Expr) -> TracedModule | None:
    """Returns the traced submodule that ``expr`` calls, if the submodule has a graph to unroll."""
    if not (isinstance(expr, CallMethod) and is_call_module(expr)):
        return None
    callee = expr.inputs[0].owner
    return callee if isinstance(callee, TracedModule) and not callee.is_qat else None
