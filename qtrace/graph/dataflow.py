"""Dataflow of a flat graph: the nodes that depend on its inputs, and the nodes that its outputs need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import megengine.functional as F

from qtrace.graph.interpreter import interpret
from qtrace.graph.types import CallFunction, Expr, ModuleNode, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, reads_shape, tensor_inputs

__all__ = ["evaluate_fixed", "fixed_nodes", "needed_nodes", "static_nodes"]

_LIKE = (F.zeros_like, F.ones_like, F.full_like)


def static_nodes(traced: TracedModule) -> set[Node]:
    """Finds the tensor nodes that do not depend on the values of the graph's inputs.

    They depend on parameters, constants and shapes only: ``reshape(self.table)``, or the positions of anchors
    that ``arange`` computes from ``x.shape``. Reading the shape of a tensor is not reading its values.

    Args:
        traced: a flat traced module.
    """
    static: set[Node] = set()
    for expr in exprs(traced):
        if all(n in static for n in _values_read(expr)):
            static.update(n for n in expr.outputs if isinstance(n, TensorNode))
    return static


def fixed_nodes(traced: TracedModule, without: Callable[[Expr], bool] = lambda expr: False) -> set[Node]:
    """Finds the nodes that are computed only from parameters and constants, and these themselves.

    Their values are known without a batch, unlike values of `static_nodes` that depend on an input's shape.

    Args:
        traced: a flat traced module.
        without: returns whether to exclude the outputs of an expr.
    """
    fixed = {n for n in traced.graph.inputs if isinstance(n, ModuleNode)}
    for expr in exprs(traced):
        if all(n in fixed for n in expr.inputs) and not without(expr):
            fixed.update(n for n in expr.outputs)
    return fixed


def needed_nodes(traced: TracedModule, shapes: bool = False, of: Iterable[Node] | None = None) -> set[Node]:
    """Returns the nodes on whose values an output of the graph depends, the outputs included.

    Args:
        traced: a flat traced module.
        shapes: whether to include the nodes of which an output reads only the shapes.
        of: the nodes that take the place of the outputs; None for the outputs.
    """
    needed: set[Node] = set(traced.graph.outputs if of is None else of)
    for expr in reversed(exprs(traced)):
        if any(n in needed for n in expr.outputs):
            needed.update(tensor_inputs(expr) if shapes else _values_read(expr))
    return needed


def evaluate_fixed(traced: TracedModule, nodes: Iterable[TensorNode]) -> dict[Node, Any]:
    """Computes nodes that depend only on parameters and constants.

    Args:
        traced: a flat traced module.
        nodes: nodes of its graph that are in `fixed_nodes`.

    Returns:
        node -> its Tensor.
    """
    targets = set(nodes)
    needed, order = set(targets), []
    for expr in reversed(exprs(traced)):
        if any(n in needed for n in expr.outputs):
            needed.update(n for n in expr.inputs)
            order.append(expr)
    values: dict[Node, Any] = {n: traced for n in traced.graph.inputs if isinstance(n, ModuleNode)}
    for expr in reversed(order):
        results = interpret(expr, [values[n] for n in expr.inputs])
        values.update((n, v) for n, v in zip(expr.outputs, results or (), strict=True))
    return {node: values[node] for node in targets}


def _values_read(expr: Expr) -> list[TensorNode]:
    """Returns the tensor nodes whose values, not only shapes, ``expr`` reads."""
    if reads_shape(expr):
        return []
    nodes = tensor_inputs(expr)
    if isinstance(expr, CallFunction) and expr.func in _LIKE:
        return [n for n in nodes if n is not expr.args[0]]
    return nodes
