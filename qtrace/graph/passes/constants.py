"""Computes, once, what does not depend on the inputs of a graph."""

from __future__ import annotations

from megengine import Parameter, Tensor
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Constant, Expr, GetAttr
from megengine.traced_module.node import ModuleNode, Node, TensorNode

from qtrace.graph.dataflow import evaluate_fixed, fixed_nodes
from qtrace.graph.edit import GraphEditor
from qtrace.graph.module_tree import set_parameter
from qtrace.graph.names import unused_name
from qtrace.graph.passes.base import FLAT, SOUND, Condition, GraphPass, PassReport
from qtrace.graph.passes.dead_code import NO_DEAD_CODE, RemoveDeadCode
from qtrace.graph.purity import find_written, is_pure
from qtrace.graph.walk import exprs, get_module

__all__ = ["CONSTANTS_FOLDED", "FoldConstants"]


class FoldConstants(GraphPass):
    """Replaces what is computed only from constants and buffers by a buffer that holds the result.

    What depends on a Parameter stays, as the Parameter could not be trained any more, unless ``parameters``
    is set. What is computed from the shapes of inputs stays: it may differ in the next call.

    Args:
        parameters: whether to take Parameters for constants, too.
    """

    requires = (FLAT, NO_DEAD_CODE)

    def __init__(self, parameters: bool = False) -> None:
        self.parameters = parameters

    def change(self, traced: TracedModule) -> PassReport:
        """Stores the constant results that the rest of the graph reads, and drops their exprs."""
        fixed = _foldable(traced, self.parameters)
        folded = _results(traced, fixed)
        values = evaluate_fixed(traced, folded)
        paths: dict[TensorNode, str] = {}
        changed = []
        for node in folded:
            path = unused_name(f"folded_{node.name}", lambda name: hasattr(traced, name))
            set_parameter(traced, path, Tensor(values[node].numpy()))
            paths[node] = path
            changed.append(f"{node.name}: stored as {path}")
        with GraphEditor(traced) as editor:
            for node, path in paths.items():
                editor.put_in_place(editor.get_attr(path), node)
        RemoveDeadCode().run(traced)
        return PassReport(self.name, tuple(changed))


def _foldable(traced: TracedModule, parameters: bool) -> set[Node]:
    """Returns the nodes that are computed only from constants, and these themselves."""
    written = find_written(exprs(traced))

    def varies(expr: Expr) -> bool:
        if not is_pure(expr) or any(node in written for node in expr.outputs):
            return True
        if isinstance(expr, GetAttr) and not parameters and isinstance(expr.outputs[0], TensorNode):
            return isinstance(get_module(traced, expr.name), Parameter)
        if isinstance(expr, GetAttr) and isinstance(expr.outputs[0], ModuleNode) and not parameters:
            return any(True for _ in get_module(traced, expr.name).parameters())
        return False

    return fixed_nodes(traced, without=varies)


def _results(traced: TracedModule, fixed: set[Node]) -> list[TensorNode]:
    """Returns the computed nodes of ``fixed`` that an expr outside of it reads, or the caller."""
    outputs = set(traced.graph.outputs)
    return [
        node
        for expr in exprs(traced)
        if not isinstance(expr, (GetAttr, Constant))
        for node in expr.outputs
        if node in fixed
        and (node in outputs or any(u.outputs and u.outputs[0] not in fixed for u in node.users))
    ]


def _find(traced: TracedModule) -> list[str]:
    return [f"{n.name} is computed from constants" for n in _results(traced, _foldable(traced, False))]


CONSTANTS_FOLDED = Condition("computes nothing from constants", _find)
FoldConstants.ensures = (NO_DEAD_CODE, CONSTANTS_FOLDED, SOUND)
