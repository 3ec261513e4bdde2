"""A copy of what an edit may change, with which a failed edit is undone."""

from __future__ import annotations

from typing import Any

from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr, GetAttr
from megengine.traced_module.node import Node, TensorNode

from qtrace.graph.walk import modules_of, owner

__all__ = ["Snapshot"]

_UNSET = object()


class Snapshot:
    """The state of a flat traced module before an edit: graph, nodes, and the attributes of all modules.

    The values within tensors are not copied: a write into a Tensor, such as ``weight[...] = 0``, stays.

    Args:
        traced: a flat traced module.
    """

    def __init__(self, traced: TracedModule) -> None:
        self.traced = traced
        graph = self.graph = traced.graph
        self.inputs, self.outputs = list(graph._inputs), list(graph._outputs)
        self.names = dict(graph._namespace._used_names)
        self.order = list(graph._exprs)
        self.exprs = [(e, list(e.inputs), e.const_val, e.arg_def) for e in graph._exprs]
        nodes = [*graph._inputs, *(n for e in graph._exprs for n in e.outputs)]
        self.nodes = [(n, list(n.users), n._name, n._qualname, _type(n)) for n in nodes]
        self.modules: dict[Module, dict[str, Any]] = {m: _attributes(m) for m in modules_of(traced)}

    def restore(self) -> None:
        """Restores the graph, its exprs and nodes, and the attributes of the modules."""
        for module, attributes in self.modules.items():
            vars(module).clear()
            vars(module).update(attributes)
        self.graph._inputs[:], self.graph._outputs[:] = self.inputs, self.outputs
        self.graph._namespace._used_names = self.names
        self.graph._exprs = self.order
        for expr, inputs, const_val, arg_def in self.exprs:
            expr.inputs, expr.const_val, expr.arg_def = inputs, const_val, arg_def
        for node, users, name, qualname, kind in self.nodes:
            node.users, node._name, node._qualname = users, name, qualname
            if isinstance(node, TensorNode):
                node._shape, node._dtype = kind
        self.traced._update_ref()
        self.graph._reset_ids()

    def has_other_endpoints(self) -> bool:
        """Returns whether the inputs or outputs of the graph have changed."""
        return self.inputs != self.graph._inputs or self.outputs != self.graph._outputs

    def changed_modules(self) -> frozenset[Module]:
        """Returns the modules whose attributes have changed."""
        return frozenset(m for m, old in self.modules.items() if _differ(vars(m), old))

    def changed_calls(self) -> set[Expr]:
        """Returns the exprs that call a module, or read a tensor of one, whose attributes have changed."""
        changed = self.changed_modules()
        if not changed:
            return set()
        exprs: set[Expr] = set()
        for expr in self.graph._exprs:
            module = owner(expr)
            if isinstance(expr, GetAttr) or (
                module is not None and not changed.isdisjoint(modules_of(module))
            ):
                exprs.add(expr)
        return exprs


def _attributes(module: Module) -> dict[str, Any]:
    """Copies the attributes of ``module``, and the containers among them in which others are set."""
    return {k: type(v)(v) if type(v) in (list, dict) else v for k, v in vars(module).items()}


def _differ(now: dict[str, Any], before: dict[str, Any]) -> bool:
    if now.keys() != before.keys():
        return True
    return any(
        value is not before[key] and not (type(value) in (list, dict) and _same_items(value, before[key]))
        for key, value in now.items()
    )


def _same_items(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or len(a) != len(b):
        return False
    pairs = zip(a, b, strict=True) if isinstance(a, list) else ((a[k], b.get(k, _UNSET)) for k in a)
    return all(x is y for x, y in pairs)


def _type(node: Node) -> tuple[Any, Any]:
    return (node._shape, node._dtype) if isinstance(node, TensorNode) else (None, None)
