"""Puts a loaded TracedModule together, as MegEngine does but in linear time, and checks what it would run."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from megengine import Parameter, Tensor
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, Expr, GetAttr, Input
from megengine.traced_module.node import ModuleNode, TensorNode
from megengine.traced_module.pytree import LeafDef, TreeDef
from megengine.traced_module.serialization import (
    load_apply_expr,
    load_call_module_expr,
    load_call_tensor_method_expr,
    load_functional,
)
from megengine.traced_module.traced_module import InternalGraph, NameSpace

from qtrace.graph import allowlist
from qtrace.graph._names import RefusedError, shown

EXPRS = (Apply, CallFunction, CallMethod, Constant, GetAttr, Input)
NODES = (ModuleNode, TensorNode)
PATTERN = re.compile(r"[*+?{}()|^$\\]")  # MegEngine makes a regular expression of a graph's name


def restore(module: TracedModule, state: dict[str, Any]) -> None:
    """What ``TracedModule.__setstate__`` does, with sets and counts where MegEngine searches lists.

    Args:
        module: a bare TracedModule.
        state: its attributes; module states have become modules already.
    """
    Module.__setstate__(module, state)
    check_structure(module)
    module._update_ref()
    graphs = list(module.argdef_graph_map.values())
    for graph in graphs:
        for expr in graph._exprs:
            _apply_loaders(expr)
    for graph in graphs:
        _insert_missing(graph)
        _fix_users(graph)
        for expr in graph._exprs:
            graph._namespace.auto_naming_for_outputs(expr)
    module._update_ref()
    for graph in graphs:
        graph._reset_ids()


def _apply_loaders(expr: Expr) -> None:
    """MegEngine's own adaptations of exprs that an older version saved."""
    if isinstance(expr, CallFunction):
        load_functional(expr)
    if isinstance(expr, CallMethod):
        if expr.method == "__call__":
            load_call_module_expr(expr)
        else:
            load_call_tensor_method_expr(expr)
    if isinstance(expr, Apply):
        load_apply_expr(expr)


def _insert_missing(graph: InternalGraph) -> None:
    """Puts exprs that a loader has made before the first expr that reads them."""
    present = set(map(id, graph._exprs))
    index = 0
    while index < len(graph._exprs):
        added = False
        for node in graph._exprs[index].inputs:
            if id(node.expr) not in present and not isinstance(node.expr, Input):
                graph._exprs.insert(index, node.expr)
                present.add(id(node.expr))
                added = True
        if not added:
            index += 1


def _fix_users(graph: InternalGraph) -> None:
    """Makes ``users`` and ``expr`` of every node agree with the exprs."""
    counts: dict[int, Counter[int]] = {}
    for expr in graph._exprs:
        for node in expr.inputs:
            if id(node) not in counts:
                counts[id(node)] = Counter(map(id, node.users))
            missing = expr.inputs.count(node) - counts[id(node)][id(expr)]
            if missing > 0:
                node.users.extend([expr] * missing)
            for _ in range(-missing):
                node.users.remove(expr)
            counts[id(node)][id(expr)] += missing
        for node in expr.outputs:
            if node.expr is not expr:
                if node in node.expr.outputs:
                    raise RefusedError(f"its node {shown(node._name)} is the output of two exprs")
                node.expr = expr
    for node in graph.nodes(False):
        node.users = [user for user in node.users if node in user.inputs]


def check_structure(module: TracedModule) -> None:
    """Refuses a module whose graphs are not made of exactly MegEngine's own parts.

    MegEngine calls methods of what it finds in a graph and sets attributes on it, so that only these may be
    there.

    Raises:
        RefusedError: naming the part.
    """
    _all("argdef_graph_map", [module.argdef_graph_map], (dict,))
    _all("argdef_outdef_map", [module.argdef_outdef_map], (dict,))
    _all("argdef_graph_map", module.argdef_graph_map.values(), (InternalGraph,))
    _all("argdef_graph_map", module.argdef_graph_map, (TreeDef,))
    _all("argdef_outdef_map", module.argdef_outdef_map.values(), (TreeDef, LeafDef))
    for graph in module.argdef_graph_map.values():
        _all("namespace", [graph._namespace], (NameSpace,))
        if type(graph._namespace.qualname) is not str or PATTERN.search(graph._namespace.qualname):
            raise RefusedError(f"a graph in it is called {shown(graph._namespace.qualname)}")
        _all("list of exprs", [graph._exprs, graph._inputs, graph._outputs], (list,))
        _all("list of exprs", graph._exprs, EXPRS)
        seen: set[int] = set()
        _check_nodes(graph._inputs, seen)
        _check_nodes(graph._outputs, seen)
        _all("first input of a graph", graph._inputs[:1], (ModuleNode,))
        for expr in graph._exprs:
            _all("list of nodes", [expr.inputs, expr.outputs], (list,))
            _check_nodes(expr.inputs, seen)
            _check_nodes(expr.outputs, seen)
            if type(expr) in (GetAttr, Constant) and len(expr.outputs) != 1:
                raise RefusedError(f"a {type(expr).__name__} in it has {len(expr.outputs)} outputs")
            first = expr.inputs[0] if expr.inputs else None
            if type(expr) is CallMethod and (expr.method == "__call__") != (type(first) is ModuleNode):
                raise RefusedError(f"it calls the method {shown(expr.method)} of {shown(first)}")
        _check_getattrs(module, graph)


def _check_nodes(nodes: list[Any], seen: set[int]) -> None:
    for node in nodes:
        if id(node) in seen:  # the users of a node are many: once is enough
            continue
        seen.add(id(node))
        if type(node) not in NODES or type(node.expr) not in EXPRS or type(node.users) is not list:
            raise RefusedError(f"a graph in it has {shown(node)} for a node")
        for user in node.users:
            if type(user) not in EXPRS:
                raise RefusedError(f"a node in it has {shown(user)} for a user")


def _all(what: str, values: Any, kinds: tuple[type, ...]) -> None:
    for value in values:
        if type(value) not in kinds:
            raise RefusedError(f"the {what} of a graph in it holds {shown(value)}")


def check_calls(module: TracedModule) -> None:
    """Refuses a graph that would read or call anything but modules, tensors and listed methods of tensors.

    Functions, ops and module classes were checked by name before they were imported. This runs when the whole
    model is there: a file can change lists and dicts until its last byte.

    Raises:
        RefusedError: naming the attribute or method.
    """
    check_structure(module)
    for graph in module.argdef_graph_map.values():
        for expr in graph._exprs:
            if type(expr) is CallMethod:
                _check_method(expr)
            elif type(expr) is GetAttr and expr.inputs[0].owner is None:
                for owner in _passed_in(expr.inputs[0], 0):
                    _read(expr, owner)


def _check_getattrs(module: TracedModule, graph: InternalGraph) -> None:
    """Follows the modules of a graph as ``_update_ref`` does, which trusts the names of attributes."""
    owners: dict[int, Any] = {id(graph._inputs[0]): module}
    passed_in = set(map(id, graph._inputs[1:]))
    for expr in graph._exprs:
        if type(expr) is Constant and type(expr.outputs[0]) is ModuleNode:
            owners[id(expr.outputs[0])] = expr.value
        if type(expr) is not GetAttr:
            continue
        source = expr.inputs[0]
        if type(source) is ModuleNode and id(source) in passed_in and type(expr.outputs[0]) is TensorNode:
            continue  # a module that the caller hands over: check_calls looks at it once the caller is there
        owners[id(expr.outputs[0])] = _read(expr, owners.get(id(source)))


def _passed_in(node: Any, depth: int) -> list[Any]:
    """The modules that callers hand over as this input."""
    if type(node) is not ModuleNode or depth > 100:
        return [None]
    if node.owner is not None:
        return [node.owner]
    return [found for actual in node.actual_node for found in _passed_in(actual, depth + 1)] or [None]


def _read(expr: GetAttr, owner: Any) -> Any:
    """The module or tensor that a GetAttr reads."""
    if not isinstance(owner, Module):
        raise RefusedError(f"it reads the attribute {shown(expr.name)} of something that is no module")
    value = expr.interpret(owner)[0]
    if not isinstance(value, Module if type(expr.outputs[0]) is ModuleNode else RawTensor):
        raise RefusedError(f"it reads the attribute {shown(expr.name)} of a module, which is {shown(value)}")
    return value


def _check_method(expr: CallMethod) -> None:
    receiver = expr.args[0]
    if type(receiver) is ModuleNode:
        known = expr.method == "__call__" and isinstance(receiver.owner, Module)
    elif type(receiver) is TensorNode:
        known = expr.method in allowlist.TENSOR_METHODS
    else:
        known = expr.method == "__new__" and receiver in (Tensor, Parameter)
    if not known or (expr.inputs and expr.inputs[0] is not receiver and isinstance(receiver, NODES)):
        raise RefusedError(f"it calls the method {shown(expr.method)} of {shown(receiver)}")
