"""Finds exprs of a graph by what they call and what they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction, CallMethod, Expr, GetAttr, is_call_module
from megengine.traced_module.node import ModuleNode, Node
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError
from qtrace.gradients import plain
from qtrace.graph.walk import called_graph, op_label, owner

__all__ = ["find"]


def find(
    traced: TracedModule,
    *,
    op: str | None = None,
    function: Callable[..., Any] | None = None,
    method: str | None = None,
    module: type[Module] | None = None,
    name: str | None = None,
    attribute: str | None = None,
) -> list[Expr]:
    """Returns the exprs of ``traced`` that meet all of the conditions, in the order of execution.

    The graphs of traced submodules are searched, too, each once. A prepared graph's convolutions, which have
    gradients of qtrace's, are found as ``F.conv2d``.

    Args:
        traced: a traced module of any kind: flat or hierarchical, prepared or converted.
        op: what the expr calls, as `format_table` shows it, or a glob pattern: ``Conv2d``, ``F.relu``,
            ``Tensor.*``.
        function: the function that the expr calls.
        method: the method of a Tensor that the expr calls, such as ``reshape`` or ``__add__``.
        module: a class; the expr calls a module of it.
        name: the name of a node that the expr produces, or a glob pattern.
        attribute: the dotted path of a module or tensor that the expr calls or reads, below the top module,
            or a glob pattern.

    Raises:
        GraphError: when ``traced`` is no traced module, there is no condition, or ``module`` is no class.
    """
    conditions = (op, function, method, module, name, attribute)
    if not isinstance(traced, TracedModule):
        raise GraphError(f"find takes a TracedModule, not {type(traced).__name__}.")
    if all(condition is None for condition in conditions):
        raise GraphError("find needs a condition: op, function, method, module, name or attribute.")
    if module is not None and not isinstance(module, type):
        raise GraphError(f"find takes a class as module, such as M.Conv2d, not {module!r}.")
    matches: list[Expr] = []
    visited: set[int] = set()
    for graph in traced.argdef_graph_map.values():
        for expr, paths in _walk(graph, "", visited):
            if (
                (op is None or fnmatchcase(op_label(expr), op))
                and (function is None or _calls_function(expr, function))
                and (method is None or _calls_method(expr, method))
                and (module is None or isinstance(owner(expr), module))
                and (name is None or any(fnmatchcase(str(n.name), name) for n in expr.outputs))
                and (attribute is None or any(fnmatchcase(path, attribute) for path in paths))
            ):
                matches.append(expr)
    return matches


def _walk(graph: InternalGraph, path: str, visited: set[int]) -> Iterator[tuple[Expr, list[str]]]:
    """Yields the exprs of ``graph`` and of the graphs that it calls, with the paths that each reads."""
    if id(graph) in visited:
        return
    visited.add(id(graph))
    paths: dict[Node, str] = {graph._inputs[0]: path}
    for expr in graph._exprs:
        if isinstance(expr, GetAttr):
            paths[expr.outputs[0]] = f"{paths.get(expr.inputs[0], '')}.{expr.name}".lstrip(".")
            if not isinstance(expr.outputs[0], ModuleNode):
                yield expr, [paths[expr.outputs[0]]]
            continue
        yield expr, [paths[node] for node in expr.inputs if paths.get(node)]
        called = called_graph(expr)
        if called is not None:
            yield from _walk(called, paths.get(expr.inputs[0], ""), visited)


def _calls_function(expr: Expr, function: Callable[..., Any]) -> bool:
    return isinstance(expr, CallFunction) and plain(expr.func) is plain(function)


def _calls_method(expr: Expr, method: str) -> bool:
    return isinstance(expr, CallMethod) and not is_call_module(expr) and expr.method == method
