"""Runs a flat graph step by step on several batches at once, so that parameters may change in between."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr
from megengine.traced_module.node import ModuleNode, Node

from qtrace.errors import GraphError
from qtrace.graph.dataflow import fixed_nodes
from qtrace.graph.interpreter import Interpreter, interpret, last_uses
from qtrace.graph.ordering import order_together

__all__ = ["Stepper"]


class Stepper:
    """The values that are alive before one expr of the graph, for every batch.

    An algorithm that changes the parameters of one layer after the other computes each expr once a batch,
    not the whole graph once a layer. Values that depend on parameters alone are computed when read.

    Args:
        traced: a flat traced module.
        batches: pairs of positional and keyword arguments; all batches are in memory at once.
        together: groups of exprs whose members are computed directly after each other. The graph's order
            changes as far as necessary.

    Attributes:
        count: the number of batches.

    Raises:
        GraphError: when the exprs of a group cannot stand together.
    """

    def __init__(
        self,
        traced: TracedModule,
        batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]],
        together: Sequence[Sequence[Expr]] = (),
    ) -> None:
        self.traced, self.graph = traced, traced.graph
        steps = order_together(self.graph._exprs, together)
        if steps is None:
            raise GraphError("exprs that are to be computed side by side need the results of one another.")
        self._steps = steps
        self._order = {e: i for i, e in enumerate(steps)}
        fixed = fixed_nodes(traced)
        self._fixed = {e for e in self.graph._exprs if all(n in fixed for n in e.inputs)}
        self._modules = {n for n in self.graph._inputs if isinstance(n, ModuleNode)}
        self._known: dict[Node, Any] = {}
        self._ahead: dict[tuple[Any, Any], Any] = {}
        self._frees = last_uses(self.graph, steps)
        self._at = 0
        self._values: list[dict[Node, Any]] = []
        binder = Interpreter(traced)
        for args, kwargs in batches:
            inputs = binder.bind(args, kwargs)[1]
            self._values.append(dict(zip(self.graph._inputs, inputs, strict=True)))
        self.count = len(self._values)

    def advance(self, expr: Expr) -> None:
        """Computes everything before ``expr``.

        Raises:
            GraphError: when ``expr`` was passed already, or is not in the graph.
        """
        goal = self._order.get(expr, -1)
        if goal < self._at:
            raise GraphError(f"{expr} lies behind: a stepper goes forward only.")
        for step in self._steps[self._at : goal]:
            if step in self._fixed:
                continue
            for batch, values in enumerate(self._values):
                results = self._ahead.pop((step, batch), None) or self._run(step, values)
                values.update((n, v) for n, v in zip(step.outputs, results, strict=True))
                for key in self._frees[step]:
                    if key not in self._modules:
                        values.pop(key, None)
        if goal > self._at:
            self._ahead.clear()
        self._at = goal

    def value(self, node: Node, batch: int) -> Any:
        """Returns the value of a node that is alive, or that depends on parameters alone.

        Args:
            node: a node of the graph.
            batch: the index of the batch.
        """
        return self._get(node, self._values[batch])

    def outputs(self, expr: Expr, batch: int) -> list[Any]:
        """Returns the outputs of ``expr``, the next one or one of its group, for a batch.

        They are computed once, until parameters change.
        """
        key = expr, batch
        if key not in self._ahead:
            self._ahead[key] = self._run(expr, self._values[batch])
        return list(self._ahead[key])

    def compute(self, exprs: Iterable[Expr], nodes: Iterable[Node], batch: int) -> list[Any]:
        """Returns the values of ``nodes`` after running ``exprs`` on the values that are alive."""
        values = dict(self._values[batch])
        for expr in exprs:
            results = self._run(expr, values)
            values.update((n, v) for n, v in zip(expr.outputs, results, strict=True))
        return [self._get(n, values) for n in nodes]

    def fork(self) -> Stepper:
        """Returns an independent stepper at the same expr."""
        twin = copy.copy(self)
        twin._known, twin._ahead, twin._values = {}, {}, [dict(values) for values in self._values]
        return twin

    def changed(self) -> None:
        """Discards the values that were computed from parameters; call it after changing parameters."""
        self._known.clear()
        self._ahead.clear()

    def _run(self, expr: Expr, values: dict[Node, Any]) -> Any:
        results = interpret(expr, [self._get(n, values) for n in expr.inputs])
        return () if results is None else results

    def _get(self, node: Node, values: dict[Node, Any]) -> Any:
        if node in values:
            return values[node]
        if node not in self._known:
            expr = node.expr
            if expr not in self._fixed:
                raise GraphError(f"{node._name} has no value here: it is computed later, or was dropped.")
            results = self._run(expr, values)
            self._known.update((n, v) for n, v in zip(expr.outputs, results, strict=True))
        return self._known[node]
