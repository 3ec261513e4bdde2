"""A traced graph for people: as a table, as a drawing of Graphviz, and the exprs of a name or a callee."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction, CallMethod, Constant, Expr, GetAttr, is_call_module
from megengine.traced_module.node import ModuleNode, Node, TensorNode
from megengine.traced_module.traced_module import InternalGraph

from qtrace.display import format_table
from qtrace.errors import GraphError
from qtrace.gradients import plain
from qtrace.graph.walk import called_graph, check_traced, module_path, op_label, owner
from qtrace.storage.outputs import WRITTEN

# Finds exprs of a graph by what they call and what they are called.


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
    check_traced(traced, "find takes")
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


# A traced graph as a table of plain text.


def table(traced: TracedModule, max_width: int | None = 160) -> str:
    """Formats one row for each expr of the top graph: id, op, outputs, inputs, module path, shape, dtype.

    Args:
        traced: a traced module; a call of a submodule in a hierarchical graph is one row.
        max_width: largest width in characters; None for no limit.

    Raises:
        GraphError: when ``traced`` is not a traced module.
    """
    check_traced(traced, "table takes")
    graph: InternalGraph = traced.graph
    inputs = dict.fromkeys(node.expr for node in graph._inputs[1:])
    rows = [_row(expr) for expr in (*inputs, *graph._exprs)]
    rows.append(("", "output", "", ", ".join(n._name for n in graph._outputs), "", "", ""))
    return format_table(("id", "op", "output", "inputs", "module", "shape", "dtype"), rows, max_width)


def _row(expr: Expr) -> tuple[str, ...]:
    tensors = [n for n in expr.outputs if isinstance(n, TensorNode)]
    return (
        str(expr._id),
        op_label(expr),
        ", ".join(n._name for n in expr.outputs),
        _arguments(expr),
        module_path(expr),
        ", ".join(dict.fromkeys(_shape(n) for n in tensors)),
        ", ".join(dict.fromkeys(_dtype(n) for n in tensors)),
    )


def _arguments(expr: Expr) -> str:
    """Formats the arguments as source code; a called module has a column of its own."""
    try:
        args, kwargs = expr.unflatten_args(expr.inputs)
    except AssertionError:  # no argument structure, or a broken one: a table must show that graph too
        return ", ".join(n._name for n in expr.inputs)
    shown = [_text(a) for a in args[1 if is_call_module(expr) else 0 :]]
    while shown and shown[-1] == "None":  # options that were left at their default
        shown.pop()
    return ", ".join(shown + [f"{key}={_text(value)}" for key, value in kwargs.items()])


def _text(value: Any) -> str:
    if isinstance(value, Node):
        return str(value._name)
    if type(value) in (list, tuple):
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{', '.join(_text(v) for v in value)}{right}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        parts = ["" if p is None else _text(p) for p in (value.start, value.stop, value.step)]
        return ":".join(parts if value.step is not None else parts[:2])
    if value is Ellipsis:
        return "..."
    return str(value)


def _shape(node: TensorNode) -> str:
    if node.shape is None:
        return "?"
    return "x".join(str(int(n)) for n in node.shape) or "scalar"


def _dtype(node: TensorNode) -> str:
    return "?" if node.dtype is None else str(getattr(node.dtype, "__name__", node.dtype))


# Draws any traced graph for Graphviz: ops as boxes, shapes on the edges.


def dot(traced: TracedModule) -> str:
    """Returns a Graphviz document of the top graph; attributes and constants are not drawn.

    Args:
        traced: a traced module: float, prepared or converted; a call of a submodule in a hierarchical graph
            is one box.
    """
    graph = traced.graph
    ops = [e for e in graph._exprs if not isinstance(e, (GetAttr, Constant))]
    drawn = {e: f"op{index}" for index, e in enumerate(ops)}
    ends: dict[Node, str] = {n: f"in{i}" for i, n in enumerate(graph._inputs[1:])}
    lines = [
        f"digraph {quote(graph._name)} {{",
        f'  comment="{WRITTEN}";',
        '  node [shape=box, style="rounded,filled", fillcolor="#eef3fb", fontname="Helvetica", fontsize=10];',
        '  edge [fontname="Helvetica", fontsize=8, color="#999999"];',
    ]
    lines += [f"  {end} [label={quote(f'input {node._name}')}, shape=oval];" for node, end in ends.items()]
    sources = {**ends, **{n: name for e, name in drawn.items() for n in e.outputs}}
    for expr, name in drawn.items():
        lines.append(f"  {name} [label={quote(_label(expr))}];")
        lines += _edges(dict.fromkeys(expr.inputs), sources, name)
    for index, node in enumerate(graph._outputs):
        lines.append(f'  out{index} [label="output {index}", shape=oval];')
        lines += _edges({node: None}, sources, f"out{index}")
    return "\n".join([*lines, "}"]) + "\n"


def _edges(nodes: dict[Node, None], sources: dict[Node, str], reader: str) -> list[str]:
    return [
        f"  {sources[node]} -> {reader} [label={quote(_label_of_edge(node))}];"
        for node in nodes
        if node in sources
    ]


def _label(expr: Expr) -> str:
    names = ", ".join(str(node._name) for node in expr.outputs)
    return "\n".join(dict.fromkeys((op_label(expr), names, module_path(expr)))).strip()


def _label_of_edge(node: Node) -> str:
    if not isinstance(node, TensorNode) or node.shape is None:
        return "?"
    text = "x".join(str(int(n)) for n in node.shape) or "scalar"
    dtype = str(getattr(node.dtype, "__name__", node.dtype))
    return text if dtype == "float32" else f"{dtype} {text}"


def quote(text: str) -> str:
    """Returns ``text`` as a string of a DOT file."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
