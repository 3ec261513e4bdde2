"""Builds modules from an assignment of a graph's exprs to parts, in time linear in the exprs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction, CallMethod, Constant, Expr, GetAttr, Input
from megengine.traced_module.node import ModuleNode, Node, TensorNode
from megengine.traced_module.pytree import TreeDef, tree_flatten
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError
from qtrace.extras.split.composition import Composition, GraphPart
from qtrace.graph.arguments import set_arguments
from qtrace.graph.dataflow import static_nodes
from qtrace.graph.edit import RECORD_ATTRIBUTE
from qtrace.graph.finish import finish
from qtrace.graph.flatten import flatten
from qtrace.graph.interface import Interface, TensorInfo, read_interface, write_interface
from qtrace.graph.node_meta import own_meta
from qtrace.graph.origin import copy_origin
from qtrace.graph.purity import find_written, is_pure
from qtrace.graph.source_lines import copy_line
from qtrace.graph.walk import IN_PLACE, exprs, get_module

__all__ = ["build_parts", "copyable_exprs", "flat_copy"]


def flat_copy(traced: TracedModule, purpose: str) -> TracedModule:
    """Returns a flat copy of a float graph, whose exprs are to be assigned to parts.

    ``y += z`` becomes ``y + z``, since ``y`` may be passed to another part.

    Args:
        traced: a traced module.
        purpose: the name of the calling function, for messages.

    Raises:
        GraphError: when ``traced`` is no traced module, or is prepared or converted.
    """
    if not isinstance(traced, TracedModule):
        raise GraphError(f"{purpose} takes a TracedModule, not a {type(traced).__name__}: trace it first.")
    if getattr(traced, RECORD_ATTRIBUTE, None) is not None:
        raise GraphError(
            f"{traced.graph._name} is prepared or converted, and its record of quantized sites would not fit "
            f"its parts: {purpose} the float module, and prepare each part."
        )
    flat = flatten(traced)
    for expr in exprs(flat):
        if isinstance(expr, CallMethod) and expr.method in IN_PLACE:
            expr.method = IN_PLACE[expr.method]
    return flat


def copyable_exprs(flat: TracedModule) -> set[Expr]:
    """Finds the exprs that belong to no part: each part that reads their results has its own copy.

    They depend on parameters, constants and sizes of tensors only, and always give the same result.

    Args:
        flat: a flat traced module.
    """
    order = exprs(flat)
    static, written = static_nodes(flat), find_written(order)
    copyable: set[Expr] = set()
    for expr in order:
        pure = is_pure(expr) and not any(n in written for n in (*expr.inputs, *expr.outputs))
        modules = isinstance(expr, GetAttr) and isinstance(expr.outputs[0], ModuleNode)
        values = [n for n in expr.inputs if n in static]
        if modules or (
            pure
            and all(n in static for n in expr.outputs)
            and all(n.expr in copyable for n in values if not isinstance(n.expr, Input))
        ):
            copyable.add(expr)
    return copyable


def build_parts(
    flat: TracedModule, home: Mapping[Expr, int], supported: Sequence[bool | None]
) -> Composition:
    """Builds one module for each part.

    Args:
        flat: a flat float graph from `flat_copy`.
        home: expr -> the index of its part, for all exprs except `copyable_exprs`. An expr reads
            results of its own part and of earlier ones.
        supported: for each part, what `GraphPart.supported` says.
    """
    graph = flat.graph
    position = {expr: i for i, expr in enumerate(graph._exprs)}
    members: list[set[Expr]] = [set() for _ in supported]
    for expr, index in home.items():
        members[index].add(expr)
    for own in members:
        _add_copies(own, home, (n for e in tuple(own) for n in e.inputs))
    _add_copies(members[-1], home, graph._outputs)
    read: list[set[Node]] = [{n for e in own for n in e.inputs} for own in members]
    needed = set(graph._outputs)
    for index, nodes in enumerate(read):
        needed.update(n for n in nodes if home.get(n.expr, index) != index)
    parts, last = [], len(members) - 1
    for index, own in enumerate(members):
        order = sorted(own, key=position.__getitem__)
        produced = {n for e in order for n in e.outputs}
        inputs = [n for n in graph._inputs[1:] if n in read[index]]
        others = {n for n in read[index] if n not in produced and not isinstance(n.expr, Input)}
        inputs += sorted(others, key=lambda n: _place(n, position))
        outputs = [n for e in order for n in e.outputs if n in needed and home.get(e, last) == index]
        parts.append(_build_part(flat, index, order, inputs, outputs, index == last, supported[index]))
    return Composition(parts, _signature(flat))


def _place(node: Node, position: Mapping[Expr, int]) -> tuple[int, int]:
    return position[node.expr], [n is node for n in node.expr.outputs].index(True)


def _add_copies(own: set[Expr], home: Mapping[Expr, int], nodes: Iterable[Node]) -> None:
    """Adds to ``own`` the copyable exprs that give ``nodes``, and those that they read."""
    stack = list(nodes)
    while stack:
        expr = stack.pop().expr
        if expr not in home and expr not in own and not isinstance(expr, Input):
            own.add(expr)
            stack.extend(expr.inputs)


def _build_part(
    flat: TracedModule,
    index: int,
    order: Sequence[Expr],
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    last: bool,
    supported: bool | None,
) -> GraphPart:
    """Builds the module of one part from its exprs in order."""
    source = flat.graph
    name = f"{source._name}_{index}"
    root, graph = TracedModule(False, {}, {}), InternalGraph(name, source._qualname)
    root.training = flat.training
    _copy_attributes(flat, root, [e.name for e in order if isinstance(e, GetAttr)])
    self_node = Input(ModuleNode, "self", source._qualname).outputs[0]
    self_node.module_type = TracedModule
    bound: dict[Node, Node] = {source._inputs[0]: self_node}
    self_node._name = graph._namespace.create_unique_name("self", self_node)
    for node in inputs:
        bound[node] = _copy_node(node, Input(TensorNode, node._name, node._qualname), graph)
        bound[node].expr.outputs[:] = [bound[node]]
    graph._inputs[:] = [self_node, *(bound[n] for n in inputs)]
    passed = {*inputs, *outputs}
    for expr in order:
        new = copy.copy(expr)
        new.inputs = [bound[n] for n in expr.inputs]
        if not find_written([expr]).isdisjoint(passed):
            new.inputs[0] = _insert_copy(new.inputs[0], expr, graph)
        if isinstance(expr, Constant):
            new.value = copy.deepcopy(expr.value)
        if expr.const_val is not None:
            new.const_val = list(expr.const_val)
        new.outputs = [_copy_node(n, new, graph) for n in expr.outputs]
        bound.update(zip(expr.outputs, new.outputs, strict=True))
        graph._exprs.append(new)
    ((_, out_def),) = flat.argdef_outdef_map.items()
    own = tuple(outputs)
    if last and set(own) == set(source._outputs):
        own = tuple(source._outputs)  # in the structure of the whole graph
    else:
        out_def = tree_flatten(Tensor(0.0) if len(own) == 1 else (Tensor(0.0),) * len(own))[1]
    graph._outputs[:] = [bound[n] for n in own]
    _define(root, graph, out_def)
    finish(root)
    _copy_interface(flat, root, inputs, own)
    return GraphPart(name, root, tuple(n._name for n in inputs), tuple(n._name for n in own), supported)


def _insert_copy(node: Node, writer: Expr, graph: InternalGraph) -> Node:
    """Copies a tensor that other parts read before ``writer`` writes into it."""
    expr = CallFunction(F.copy)
    set_arguments(expr, (node,), {})
    copy_line(writer, expr)
    result = _copy_node(node, expr, graph)
    expr.outputs = [result]
    expr.return_val = result
    graph._exprs.append(expr)
    return result


def _define(root: TracedModule, graph: InternalGraph, out_def: TreeDef) -> None:
    """Makes ``graph`` the forward of ``root``, with one positional argument an input."""
    names = [node._name for node in graph._inputs]
    arg_def = tree_flatten(((root, *(Tensor(0.0) for _ in names[1:])), {}))[1]
    root.argdef_graph_map = {arg_def: graph}
    root.argdef_outdef_map = {arg_def: out_def}
    root.argspec = inspect.FullArgSpec(names, None, None, None, [], None, {})


def _copy_node(node: Node, expr: Expr, graph: InternalGraph) -> Node:
    """Copies ``node`` as a result of ``expr``; it has the same name in every part."""
    new = copy.copy(node)
    new.expr, new.users, new.actual_node = expr, [], []
    new.__dict__.pop("_value", None)
    own_meta(new)
    new._name = graph._namespace.create_unique_name(node._name, new)
    return new


def _copy_attributes(flat: TracedModule, root: TracedModule, paths: Sequence[str]) -> None:
    """Copies modules and tensors of ``flat`` to the same paths below ``root``; containers are made."""
    memo: dict[int, Any] = {}
    for path in sorted(paths, key=lambda path: path.count(".")):
        *parents, name = path.split(".")
        target: Any = root
        for part in parents:
            if getattr(target, part, None) is None:
                container = TracedModule(False, {}, {})
                container.training = flat.training
                setattr(target, part, container)
            target = getattr(target, part)
        if getattr(target, name, None) is None:  # else it belongs to a module that was copied as a whole
            setattr(target, name, copy.deepcopy(get_module(flat, path), memo))


def _copy_interface(
    flat: TracedModule, root: TracedModule, inputs: Sequence[Node], outputs: Sequence[Node]
) -> None:
    """Gives the inputs and outputs that ``root`` shares with an imported graph their names and types."""
    interface = read_interface(flat)
    if interface is None:
        return
    graph = flat.graph
    known = dict(zip(graph._inputs[1:], interface.inputs, strict=True))
    results = dict(zip(graph._outputs, interface.outputs, strict=True))
    sides = [
        tuple(table.get(n) or TensorInfo(n._name, np.dtype(n.dtype).name) for n in nodes)
        for table, nodes in ((known, inputs), (results, outputs))
    ]
    if all(len({info.name for info in side}) == len(side) for side in sides):
        write_interface(root, Interface(sides[0], sides[1], interface.metadata))
        copy_origin(flat, root)


def _signature(flat: TracedModule) -> TracedModule:
    """Returns a module with the arguments and the structure of the results of ``flat``, without weights."""
    result = TracedModule(False, {}, {})
    ((arg_def, graph),) = flat.argdef_graph_map.items()
    endpoints = InternalGraph(graph._name, graph._qualname)
    endpoints._inputs[:], endpoints._outputs[:] = graph._inputs, graph._outputs
    result.argdef_graph_map = {arg_def: endpoints}
    result.argdef_outdef_map = dict(flat.argdef_outdef_map)
    result.argspec = flat.argspec
    return result
