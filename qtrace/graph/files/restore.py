"""Puts a loaded TracedModule together, as MegEngine does but in linear time, and checks what it would run."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

from megengine import Parameter, Tensor
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import (
    Apply,
    CallFunction,
    CallMethod,
    Constant,
    Expr,
    GetAttr,
    Input,
    is_call_module,
)
from megengine.traced_module.node import ModuleNode, TensorNode
from megengine.traced_module.pytree import TreeDef
from megengine.traced_module.serialization import (
    load_apply_expr,
    load_call_module_expr,
    load_call_tensor_method_expr,
    load_functional,
)
from megengine.traced_module.traced_module import InternalGraph

from qtrace.graph.files import allowlist
from qtrace.graph.files.names import DEPTH, LoadBudget, RefusedError, shown
from qtrace.graph.files.trees import NODES

__all__ = ["check_calls", "restore"]


def restore(module: TracedModule, budget: LoadBudget) -> None:
    """Restores a module as ``TracedModule.__setstate__`` does, but in linear time.

    Args:
        module: a module with its attributes and checked graphs.
        budget: pays for each visit of a module, of which shared modules have many.
    """
    for graph in module.argdef_graph_map.values():
        _check_getattrs(module, graph)
    _update_refs(module, budget)
    graphs = list(module.argdef_graph_map.values())
    for graph in graphs:
        for expr in graph._exprs:
            _apply_loaders(expr)
    for graph in graphs:
        _insert_missing(graph)
        _fix_users(graph)
        for expr in graph._exprs:
            graph._namespace.auto_naming_for_outputs(expr)
    _update_refs(module, budget)
    for graph in graphs:
        _check_subgraphs(graph)
        graph._reset_ids()


def _update_refs(
    module: TracedModule,
    budget: LoadBudget,
    calls: dict[TreeDef, list[list[Any]]] | None = None,
    caller: InternalGraph | None = None,
) -> None:
    """Sets the weak references of exprs, nodes and graphs, as ``TracedModule._update_ref`` does.

    Args:
        module: the module; then those that it calls.
        budget: pays for each visit.
        calls: for each structure of arguments, the nodes of each call of ``module`` in ``caller``.
        caller: the graph that calls ``module``.
    """
    for structure, graph in module.argdef_graph_map.items():
        actual = list(zip(*calls[structure], strict=False)) if calls and structure in calls else []
        inputs = len(graph._inputs)
        # The structure of each call's arguments is hashed, which costs several steps.
        budget.work(4 + 8 * (len(graph._exprs) + inputs) + (inputs * inputs // 64 if actual else 0))
        graph_reference = weakref.ref(graph)
        if caller is not None:
            graph._top_graph = weakref.ref(caller)
        for node in graph._inputs + graph._outputs:
            node.expr._top_graph = node._top_graph = graph_reference
        graph._inputs[0]._owner = weakref.ref(module)
        for index, node in enumerate(graph._inputs):
            node.actual_node = list(actual[index]) if actual else []
        owners: dict[int, Any] = {id(graph._inputs[0]): module}
        next_calls: dict[int, dict[TreeDef, list[list[Any]]]] = {}
        for expr in graph._exprs:
            expr._top_graph = graph_reference
            for node in expr.inputs + expr.outputs:
                node._top_graph = graph_reference
            _follow(expr, owners, next_calls)
        for owner in list(owners.values()):
            if owner is not module and isinstance(owner, TracedModule):
                _update_refs(owner, budget, next_calls.get(id(owner)), graph)


def _follow(expr: Expr, owners: dict[int, Any], calls: dict[int, dict[TreeDef, list[list[Any]]]]) -> None:
    """Notes the module that an expr reads, or the call of one."""
    if type(expr) in (GetAttr, Constant) and type(expr.outputs[0]) is ModuleNode:
        node = expr.outputs[0]
        owner = expr.value if type(expr) is Constant else expr.interpret(owners[id(expr.inputs[0])])[0]
        node._owner = weakref.ref(owner)
        owners[id(node)] = owner
    if is_call_module(expr) and expr.arg_def is not None:
        owner = owners[id(expr.inputs[0])]
        calls.setdefault(id(owner), {}).setdefault(expr.arg_def, []).append(expr.inputs)


def _check_subgraphs(graph: InternalGraph) -> None:
    """Refuses a call of a traced module whose graph is missing, or made for other arguments."""
    for expr in graph._exprs:
        if not is_call_module(expr) or not isinstance(expr.inputs[0].owner, TracedModule):
            continue
        name = shown(expr.inputs[0]._name)
        inner = expr.inputs[0].owner.argdef_graph_map.get(expr.arg_def)
        if inner is None:
            raise RefusedError(f"it calls the module {name}, which lacks a graph for these arguments")
        takes, gives = len(inner._inputs), len(inner._outputs)
        if (takes, gives) != (len(expr.inputs), len(expr.outputs)):
            raise RefusedError(
                f"it calls the module {name} with {len(expr.inputs)} values for {len(expr.outputs)}, "
                f"but its graph takes {takes} and gives {gives}"
            )


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
    """Inserts exprs that a loader created before the first expr that reads them."""
    present = set(map(id, graph._exprs))
    pending, ordered = graph._exprs[::-1], []
    while pending:
        expr = pending[-1]
        missing = []
        for node in expr.inputs:
            if id(node.expr) not in present and not isinstance(node.expr, Input):
                missing.append(node.expr)
                present.add(id(node.expr))
        pending.extend(missing)
        if not missing:
            ordered.append(pending.pop())
    graph._exprs[:] = ordered


def _fix_users(graph: InternalGraph) -> None:
    """Makes ``users`` and ``expr`` of every node agree with the exprs."""
    read = {id(expr): Counter(map(id, expr.inputs)) for expr in graph._exprs}
    listed: dict[int, Counter[int]] = {}
    for expr in graph._exprs:
        for node in expr.inputs:
            counts = listed.setdefault(id(node), Counter(map(id, node.users)))
            missing = read[id(expr)][id(node)] - counts[id(expr)]
            if missing > 0:
                node.users.extend([expr] * missing)
                counts[id(expr)] += missing
        for node in expr.outputs:
            node.expr = expr
    for node in graph.nodes(False):
        counts = listed.get(id(node), Counter())
        surplus = {user: count - read[user][id(node)] for user, count in counts.items() if user in read}
        node.users = list(_readers(node, surplus, read))


def _readers(node: Any, surplus: dict[int, int], read: dict[int, Counter[int]]) -> Iterator[Expr]:
    """The users of a node that read it, without the first ones of those that are listed too often."""
    for user in node.users:
        if id(user) not in read or not read[id(user)][id(node)]:
            continue
        if surplus.get(id(user), 0) > 0:
            surplus[id(user)] -= 1
            continue
        yield user


def check_calls(module: TracedModule, budget: LoadBudget) -> None:
    """Refuses a graph that would read or call anything but modules, tensors and listed methods of tensors.

    Functions, ops and module classes were checked by name before they were imported.

    Args:
        module: a restored module.
        budget: pays for the callers that hand a module over.

    Raises:
        RefusedError: naming the attribute or method.
    """
    for graph in module.argdef_graph_map.values():
        for expr in graph._exprs:
            if type(expr) is CallMethod:
                _check_method(expr)
            elif type(expr) is GetAttr and expr.inputs[0].owner is None:
                for owner in _passed_in(expr.inputs[0], budget, 0):
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


def _passed_in(node: Any, budget: LoadBudget, depth: int) -> list[Any]:
    """The modules that callers hand over as this input."""
    budget.work(1)
    if type(node) is not ModuleNode or depth > DEPTH:
        return [None]
    if node.owner is not None:
        return [node.owner]
    return [owner for actual in node.actual_node for owner in _passed_in(actual, budget, depth + 1)] or [None]


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
