"""Splits a graph into parts that are modules of their own."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction, CallMethod, Constant, Expr, GetAttr, Input
from megengine.traced_module.node import ModuleNode, Node, TensorNode
from megengine.traced_module.pytree import tree_flatten
from megengine.traced_module.traced_module import InternalGraph

from qtrace.display import Displayed
from qtrace.errors import GraphError
from qtrace.graph.edit import RECORD_ATTRIBUTE
from qtrace.graph.flatten import flatten
from qtrace.graph.interface import Interface, TensorInfo, read_interface, write_interface
from qtrace.graph.interpreter import Interpreter, static_nodes
from qtrace.graph.notes import copy_line, own_meta
from qtrace.graph.origin import copy_origin
from qtrace.graph.passes import find_written, is_pure
from qtrace.graph.stepping import finish
from qtrace.graph.walk import (
    IN_PLACE,
    check_traced,
    exprs,
    get_module,
    set_arguments,
    set_graph,
    set_positional_graph,
)
from qtrace.plugins.options import check_arguments


@dataclass(frozen=True)
class GraphPart:
    """One part of a graph.

    Attributes:
        name: the name of the part's graph.
        module: the part as a traced module, which shares nothing with the other parts.
        inputs: the names of the tensors that ``module`` takes, by position: inputs of the whole graph first,
            then results of earlier parts.
        outputs: the names of the tensors that ``module`` returns: one tensor, or a tuple. The last part
            returns them in the structure of the whole graph where it computes all of its outputs.
        supported: whether the backend runs the part, if the graph was partitioned by a backend; else None.
    """

    name: str
    module: TracedModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    supported: bool | None = None


class Composition(Displayed, Sequence[GraphPart]):
    """The parts of a graph in the order in which they run; calling it computes what the graph computes.

    Args:
        parts: the parts in order.
        signature: a module with the inputs, outputs and argument structure of the whole graph; its exprs are
            not run.

    Attributes:
        inputs: the names of the inputs of the whole graph.
        outputs: the names of its outputs.
    """

    def __init__(self, parts: Sequence[GraphPart], signature: TracedModule) -> None:
        self._parts = tuple(parts)
        self._signature = signature
        self.inputs = tuple(str(n._name) for n in signature.graph._inputs[1:])
        self.outputs = tuple(str(n._name) for n in signature.graph._outputs)

    @overload
    def __getitem__(self, index: int) -> GraphPart: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[GraphPart, ...]: ...

    def __getitem__(self, index: int | slice) -> GraphPart | tuple[GraphPart, ...]:
        """Returns one part, or several."""
        return self._parts[index]

    def _text(self, max_width: int | None) -> str:
        lines = (f"{i}: {', '.join(part.inputs)} -> {', '.join(part.outputs)}" for i, part in enumerate(self))
        return "\n".join(lines)

    def __len__(self) -> int:
        """Returns the number of parts."""
        return len(self._parts)

    def __iter__(self) -> Iterator[GraphPart]:
        """Yields the parts in order."""
        return iter(self._parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the parts in order and returns what the whole graph returns.

        Args:
            *args: the arguments of the whole graph.
            **kwargs: its keyword arguments.

        Raises:
            GraphError: when the whole graph does not take such arguments.
        """
        arg_def, (_, *tensors) = Interpreter(self._signature).bind(args, kwargs)
        values = dict(zip(self.inputs, tensors, strict=True))
        for part in self._parts:
            ((_, inner),) = part.module.argdef_graph_map.items()
            results = inner.interpret(part.module, *(values[name] for name in part.inputs))
            values.update(zip(part.outputs, results, strict=True))
        results = [values[name] for name in self.outputs]
        return self._signature.argdef_outdef_map[arg_def].unflatten(results)

    def interface(self) -> dict[str, Any]:
        """Returns the parts with their tensors as plain data, for a document next to their files."""
        parts = [
            {
                "name": part.name,
                "inputs": list(part.inputs),
                "outputs": list(part.outputs),
                **({} if part.supported is None else {"supported": part.supported}),
            }
            for part in self._parts
        ]
        return {"inputs": list(self.inputs), "outputs": list(self.outputs), "parts": parts}


def flat_copy(traced: TracedModule, purpose: str) -> TracedModule:
    """Returns a flat copy of a float graph, whose exprs are to be assigned to parts.

    ``y += z`` becomes ``y + z``, since ``y`` may be passed to another part.

    Args:
        traced: a traced module.
        purpose: the name of the calling function, for messages.

    Raises:
        GraphError: when ``traced`` is no traced module, or is prepared or converted.
    """
    check_traced(traced, f"{purpose} takes")
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
        own |= _ancestors([n for e in own for n in e.inputs], home)
    members[-1] |= _ancestors(graph._outputs, home)
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
    set_positional_graph(root, graph, out_def)
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
    set_graph(result, endpoints, arg_def, flat.argdef_outdef_map[arg_def], flat.argspec)
    return result


@check_arguments
def split(
    traced: TracedModule,
    at: Sequence[str | Sequence[str]] | None = None,
    *,
    by: Callable[[Node], Hashable] | None = None,
) -> Composition:
    """Splits a graph into modules that compute together what it computes, bit for bit.

    Each cut ends a part: the part consists of all ops that the named nodes depend on and that are in no
    earlier part. The last part has the rest. Other tensors that are read after the cut, such as a skip
    connection's, are passed on by their names, too. What depends only on parameters and on sizes of
    tensors is computed in each part that reads it.

    With ``by`` each op goes into the part that the function says for its (first) output. Ops of one label are
    one part, and the parts run in the order in which they depend on each other.

    Example:
        >>> backbone, head = split(detector, at=[("c3_out", "c4_out", "c5_out")])
        >>> stages = split(detector, by=lambda node: node.qualname.split(".")[1])
        >>> qtrace.export(qtrace.convert(qtrace.calibrate(qtrace.prepare(backbone.module), data)), "b.onnx")

    Args:
        traced: a float graph, flat or hierarchical; it is not changed and shares nothing with the parts.
        at: the cuts in the order of the graph. Each is the name of a node, as `qtrace.graph.table` shows it
            for the flat graph, or several names that are cut together.
        by: takes a node of the flat graph, returns a label: text, a number, or what else can be a key.

    Returns:
        The parts, one more than cuts, or one a label; calling it composes them.

    Raises:
        GraphError: when a name is no node of the flat graph, a part would be empty, two labels depend on each
            other, or ``traced`` is prepared or converted.
    """
    if (at is None) == (by is None):
        raise GraphError("split takes either cuts (at=[...]) or a function of the node (by=...).")
    if by is not None and not callable(by):
        raise GraphError(f"by takes a function of a node, not {by!r}.")
    flat = flat_copy(traced, "split")
    if by is not None:
        home = _assign_labels(flat, by)
        return build_parts(flat, home, [None] * (max(home.values()) + 1))
    assert at is not None
    cuts = _read_cuts(at)
    nodes = {n._name: n for n in flat.graph._inputs}
    nodes.update((n._name, n) for e in exprs(flat) for n in e.outputs)
    copyable = copyable_exprs(flat)
    home = {}
    for index, names in enumerate(cuts):
        ends = [_find_node(name, nodes, copyable) for name in names]
        own = _ancestors(ends, home)
        if own.isdisjoint(set(exprs(flat)) - copyable):
            raise GraphError(
                f"nothing is between the cut at {', '.join(cuts[index - 1])} and that at {', '.join(names)}: "
                "list the cuts in the order of the graph, each once."
            )
        home.update(dict.fromkeys((e for e in own if e not in copyable), index))
    rest = [e for e in exprs(flat) if e not in home and e not in copyable]
    if not rest:
        raise GraphError(f"nothing follows the cut at {', '.join(cuts[-1])}: cut before the outputs.")
    home.update(dict.fromkeys(rest, len(cuts)))
    return build_parts(flat, home, [None] * (len(cuts) + 1))


def _read_cuts(at: Sequence[str | Sequence[str]]) -> list[tuple[str, ...]]:
    """Returns each cut as a tuple of names."""
    if isinstance(at, str):
        raise GraphError(f"split takes a list of cuts: at=[{at!r}].")
    cuts = [tuple(cut) if isinstance(cut, (tuple, list)) else (cut,) for cut in at]
    if not cuts or not all(cut and all(isinstance(name, str) for name in cut) for cut in cuts):
        raise GraphError("split takes at least one cut; each is the name of a node, or a tuple of names.")
    return cuts


def _find_node(name: str, nodes: dict[str, Node], copyable: set[Expr]) -> Node:
    """Returns the node ``name``, after which a graph can be cut.

    Raises:
        GraphError: when there is no such node, or no op of a part computes it.
    """
    node = nodes.get(name)
    if node is None:
        near = difflib.get_close_matches(name, nodes, n=3)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else "qtrace.graph.table(flatten(traced)) lists them."
        )
        raise GraphError(f"the flat graph lacks node {name!r}: {hint}")
    if isinstance(node.expr, Input):
        raise GraphError(f"{name} is an input of the graph: nothing is before it; cut after an op.")
    if node.expr in copyable or not isinstance(node, TensorNode):
        raise GraphError(
            f"{name} depends only on parameters, constants and sizes, so each part computes it itself: "
            "cut after an op that depends on input values."
        )
    return node


def _ancestors(ends: Sequence[Node], taken: Mapping[Expr, int]) -> set[Expr]:
    """Returns the exprs that ``ends`` depend on and that are not taken."""
    result: set[Expr] = set()
    stack = list(ends)
    while stack:
        expr = stack.pop().expr
        if expr not in result and expr not in taken and not isinstance(expr, Input):
            result.add(expr)
            stack.extend(expr.inputs)
    return result


def _assign_labels(flat: TracedModule, by: Callable[[Node], Hashable]) -> dict[Expr, int]:
    """Returns the index of the part of each op, for all exprs except `copyable_exprs`.

    Args:
        flat: a flat float graph.
        by: takes the first output of an op, returns the label of its part.

    Raises:
        GraphError: when a label cannot be a key, or when two labels depend on each other.
    """
    copyable = copyable_exprs(flat)
    labels = {expr: _label(by, expr) for expr in exprs(flat) if expr not in copyable and expr.outputs}
    if not labels:
        raise GraphError("split: no op of the graph depends on the values of its inputs.")
    before: dict[Any, dict[Any, Node]] = {label: {} for label in labels.values()}  # label -> what it reads
    sources: dict[Node, dict[Any, Node]] = {}  # a copied result -> the parts whose sizes it reads
    for expr in exprs(flat):
        read: dict[Any, Node] = {}
        for node in expr.inputs:
            if isinstance(node.expr, Input):
                continue
            read |= {labels[node.expr]: node} if node.expr in labels else sources.get(node, {})
        if expr in labels:
            own = labels[expr]
            before[own].update((label, node) for label, node in read.items() if label != own)
        else:
            sources.update((node, read) for node in expr.outputs)
    order = _in_order(before)
    index = {label: i for i, label in enumerate(order)}
    return {expr: index[label] for expr, label in labels.items()}


def _label(by: Callable[[Node], Hashable], expr: Expr) -> Hashable:
    node = expr.outputs[0]
    label = by(node)
    try:
        hash(label)
    except TypeError:
        raise GraphError(
            f"split: the function says {label!r} of node {node._name!r}, which cannot be a key."
        ) from None
    return label


def _in_order(before: dict[Any, dict[Any, Node]]) -> list[Any]:
    """The labels, each after the labels that it reads, and else as they first occur."""
    order: dict[Any, None] = {}
    waiting = list(before)
    while waiting:
        ready = next((label for label in waiting if before[label].keys() <= order.keys()), None)
        if ready is None:
            raise GraphError(f"split: {_circle(before, order.keys(), waiting[0])}.")
        waiting.remove(ready)
        order[ready] = None
    return list(order)


def _circle(before: dict[Any, dict[Any, Node]], done: Collection[Any], label: Any) -> str:
    """Says how parts depend on each other, from one that waits for itself through others."""
    path: list[tuple[Any, Node]] = []
    while label not in [each for each, _ in path]:
        other, node = next((o, n) for o, n in before[label].items() if o not in done)
        path.append((label, node))
        label = other
    circle = path[[each for each, _ in path].index(label) :]
    others = [*(each for each, _ in circle[1:]), label]
    reads = [
        f"{own!r} reads {node._name} of {other!r}" for (own, node), other in zip(circle, others, strict=True)
    ]
    return f"no part can run first: {', '.join(reads)}"
