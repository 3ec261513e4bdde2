"""Draws any traced graph for Graphviz: ops as boxes, shapes on the edges."""

from __future__ import annotations

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Constant, Expr, GetAttr
from megengine.traced_module.node import Node, TensorNode

from qtrace.graph.walk import module_path, op_label
from qtrace.storage.outputs import WRITTEN

__all__ = ["dot", "quote"]


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
        f"  {sources[node]} -> {reader} [label={quote(_shape(node))}];" for node in nodes if node in sources
    ]


def _label(expr: Expr) -> str:
    names = ", ".join(str(node._name) for node in expr.outputs)
    return "\n".join(dict.fromkeys((op_label(expr), names, module_path(expr)))).strip()


def _shape(node: Node) -> str:
    if not isinstance(node, TensorNode) or node.shape is None:
        return "?"
    text = "x".join(str(int(n)) for n in node.shape) or "scalar"
    dtype = str(getattr(node.dtype, "__name__", node.dtype))
    return text if dtype == "float32" else f"{dtype} {text}"


def quote(text: str) -> str:
    """Returns ``text`` as a string of a DOT file."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
