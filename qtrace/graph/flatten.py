"""Flattens a graph, and reads and writes its tree of modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Constant, Expr, GetAttr
from megengine.traced_module.node import Node, TensorNode
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError
from qtrace.graph.inference import recorded_type
from qtrace.graph.kernels import shared_copies, shared_copy
from qtrace.graph.notes import move_meta, own_meta
from qtrace.graph.renewal import InlinedCall, renew_calls, same_type
from qtrace.graph.stepping import finish
from qtrace.graph.walk import called_graph, get_module, set_graph


def add_submodule(traced: TracedModule, path: str, module: Module) -> None:
    """Adds ``module`` at the dotted ``path``; the parent must exist and the name must be free.

    Raises:
        GraphError: when the name is used already or the parent is missing.
    """
    parent, name = _parent(traced, path)
    if getattr(parent, name, None) is not None:
        raise GraphError(f"the module has an attribute {path!r} already: choose another name.")
    setattr(parent, name, module)


def set_parameter(traced: TracedModule, path: str, value: Any) -> None:
    """Sets the attribute at the dotted ``path`` to a Parameter, a Tensor or None.

    Raises:
        GraphError: when a submodule on the way is missing, or the value is no tensor.
    """
    parent, name = _parent(traced, path)
    if value is not None and not isinstance(value, Tensor):
        raise GraphError(
            f"{path!r} cannot become {value!r:.60}: give a Parameter, a Tensor or None, such as "
            "Parameter(numpy_array)."
        )
    setattr(parent, name, value)


def delete_attribute(traced: TracedModule, path: str) -> None:
    """Deletes the submodule or tensor at the dotted ``path``, and the parents that are empty afterwards."""
    parent, name = _parent(traced, path)
    delattr(parent, name)
    parent_path = path.rpartition(".")[0]
    if parent_path and not any(True for _ in parent._flatten(recursive=False)):
        delete_attribute(traced, parent_path)


def tied_parameters(traced: TracedModule) -> dict[str, str]:
    """Returns the path of a tensor that several attributes hold -> another path of it."""
    paths: dict[int, list[str]] = {}
    for place, module in traced.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                paths.setdefault(id(value), []).append(f"{place}.{name}".lstrip("."))
    groups = [group for group in paths.values() if len(group) > 1]
    return {path: next(other for other in group if other != path) for group in groups for path in group}


def _parent(traced: TracedModule, path: str) -> tuple[Module, str]:
    *parts, name = path.split(".")
    parent: Any = traced
    for part in parts:
        parent = getattr(parent, part, None)
        if not isinstance(parent, Module):
            raise GraphError(f"the module lacks submodule {part!r} on the way to {path!r}.")
    return parent, name


_NO_GRAPH: dict[str, Any] = {"watch_points": [], "watch_node_value": {}, "end_points": []}


def flatten(traced: TracedModule) -> TracedModule:
    """Copies ``traced`` without hierarchy: one graph, parameters under their old names.

    Large tensors share their values with the copy until one of both is written (`shared_copy`).

    Args:
        traced: a traced module, flat or hierarchical; it is not changed, and no change of one reaches the
            other.

    Returns:
        A flat ``TracedModule``. A submodule that is called twice becomes separate exprs on the same
        parameters; submodules of MegEngine's own kinds stay calls. The nodes of a flat graph keep their
        names, by which the record of a prepared graph knows them.
    """
    memo = shared_copies(traced)
    root = _copy_tree(traced, memo)
    arg_def, graph = next(iter(traced.argdef_graph_map.items()))
    (out_def,) = traced.argdef_outdef_map.values()
    flat = InternalGraph(graph._name, graph._qualname)
    emitter = _Emitter(root, graph, flat, memo)
    inputs = [emitter.copy_input(node) for node in graph._inputs]
    flat._inputs[:] = inputs
    outputs = emitter.inline(graph, inputs, "", "", {})
    flat._outputs[:] = outputs
    set_graph(root, flat, arg_def, out_def, traced.argspec)
    renew_calls(root, emitter.resized)
    finish(root)
    return root


def _copy_tree(module: TracedModule, memo: dict[int, Any]) -> TracedModule:
    """Copies the module tree with its tensors, without graphs."""
    if id(module) in memo:
        return memo[id(module)]
    result = TracedModule.__new__(TracedModule)
    memo[id(module)] = result
    for key, value in module.__dict__.items():
        if key in ("argdef_graph_map", "argdef_outdef_map"):
            copied: Any = {}
        elif key in _NO_GRAPH:
            copied = type(_NO_GRAPH[key])()
        elif key in ("argspec", "_m_dump_modulestate"):
            copied = None
        elif isinstance(value, TracedModule) and not value.is_qat:
            copied = _copy_tree(value, memo)
        else:
            copied = copy.deepcopy(value, memo)
        result.__dict__[key] = copied
    result.__dict__.pop("_m_dump_modulestate", None)
    return result


class _Emitter:
    """Writes the exprs of nested graphs into one flat graph."""

    def __init__(
        self, root: TracedModule, source: InternalGraph, flat: InternalGraph, memo: dict[int, Any]
    ) -> None:
        self.root = root
        self.flat = flat
        self.memo = memo
        self.attrs: dict[str, Node] = {}
        self.resized: list[InlinedCall] = []  # calls with other sizes than the submodule's graph records
        self._in_resized = False
        self._called: set[Node] = set()
        self._keeps_names = all(called_graph(expr) is None for expr in source._exprs)

    def copy_input(self, node: Node) -> Node:
        new_expr = copy.copy(node.expr)
        new = self._copy_node(node, new_expr, node._name)
        new_expr.inputs, new_expr.outputs = [], [new]
        return new

    def inline(
        self, graph: InternalGraph, inputs: list[Node], path: str, prefix: str, names: dict[Node, str]
    ) -> list[Node]:
        """Emits ``graph`` with its inputs bound to ``inputs``; returns the nodes of its outputs.

        Args:
            path: dotted path of the graph's module below the root.
            prefix: prefix of the names of the inner nodes.
            names: inner output node -> the name that the caller gives it.
        """
        bound: dict[Node, Node] = dict(zip(graph._inputs, inputs, strict=True))
        paths: dict[Node, str] = {graph._inputs[0]: path}
        objects: dict[Node, Any] = {graph._inputs[0]: get_module(self.root, path)}

        def resolve(node: Node) -> Node:
            if node not in bound:
                bound[node] = self.attr(node, paths[node])
            return bound[node]

        for expr in graph._exprs:
            if isinstance(expr, GetAttr):
                base, out = expr.inputs[0], expr.outputs[0]
                if base in paths:
                    paths[out] = f"{paths[base]}.{expr.name}".lstrip(".")
                    objects[out] = get_module(self.root, paths[out])
                    if isinstance(out, TensorNode):
                        resolve(out)
                    continue
            inner = self._inner_graph(expr, objects)
            if inner is None:
                self._clone(expr, resolve, bound, prefix, names)
                continue
            callee = expr.inputs[0]
            args = [callee if n is callee else resolve(n) for n in expr.inputs]
            output_names = {
                i: names.get(o, _join(prefix, o._name))
                for i, o in zip(inner._outputs, expr.outputs, strict=True)
            }
            inner_path = paths[callee]
            again, start = inner in self._called, len(self.flat._exprs)
            self._called.add(inner)
            resized = not self._in_resized and _needs_own_shapes(inner._inputs, args, again)
            self._in_resized |= resized
            results = self.inline(inner, args, inner_path, inner_path.replace(".", "_"), output_names)
            if resized:
                self.resized.append(InlinedCall(start, len(self.flat._exprs), results, expr.outputs))
                self._in_resized = False
            for output, result in zip(expr.outputs, results, strict=True):
                move_meta(output, result)
                bound[output] = result
        return [resolve(n) for n in graph._outputs]

    @staticmethod
    def _inner_graph(expr: Expr, objects: dict[Node, Any]) -> InternalGraph | None:
        """Returns the source's graph to inline at ``expr``, since the copied tree is without graphs."""
        graph = called_graph(expr)
        return graph if graph is not None and expr.inputs[0] in objects else None

    def attr(self, node: Node, path: str) -> Node:
        """Returns the node of the flat graph for the attribute at ``path``; there is one per path."""
        if path == "":
            return self.flat._inputs[0]
        if path not in self.attrs:
            name = path.replace(".", "_")
            expr = GetAttr(self.flat._inputs[0], type(node), path, name)
            new = expr.outputs[0]
            new.__dict__.update({k: v for k, v in node.__dict__.items() if k in _CARRIED})
            move_meta(node, new)
            new._qualname = f"{self.flat._qualname}.{path}"
            self._name(new, node._name if self._keeps_names else name)
            self.flat._exprs.append(expr)
            self.attrs[path] = new
        return self.attrs[path]

    def _clone(
        self, expr: Expr, resolve: Any, bound: dict[Node, Node], prefix: str, names: dict[Node, str]
    ) -> None:
        new = copy.copy(expr)
        new.inputs = [resolve(n) for n in expr.inputs]
        for node in new.inputs:
            node.users.append(new)
        if isinstance(expr, Constant):
            if isinstance(expr.value, Tensor):
                self.memo.setdefault(id(expr.value), shared_copy(expr.value))
            new.value = copy.deepcopy(expr.value, self.memo)
        if expr.const_val is not None:
            new.const_val = list(expr.const_val)
        new.outputs = [self._copy_node(n, new, names.get(n, _join(prefix, n._name))) for n in expr.outputs]
        bound.update((old, node) for old, node in zip(expr.outputs, new.outputs, strict=True))
        self.flat._exprs.append(new)

    def _copy_node(self, node: Node, expr: Expr, name: str) -> Node:
        new = copy.copy(node)
        new.expr, new.users, new.actual_node = expr, [], []
        new.__dict__.pop("_value", None)
        own_meta(new)
        self._name(new, name)
        return new

    def _name(self, node: Node, name: str) -> None:
        names = self.flat._namespace.used_names
        if self._keeps_names and names.get(name) is None:
            node._name, names[name] = name, node
        else:
            node._name = self.flat._namespace.create_unique_name(name, node)


def _needs_own_shapes(recorded: Sequence[Node], arguments: Sequence[Node], again: bool) -> bool:
    """Returns whether a call's tensors may have other shapes than its submodule's graph records.

    Args:
        recorded: the inputs of the submodule's graph, as recorded by the first call.
        arguments: the arguments of this call, in the same order.
        again: whether the submodule was called before; an integer tensor may then hold another size.
    """
    for parameter, argument in zip(recorded, arguments, strict=True):
        if isinstance(argument, TensorNode):
            if not same_type(recorded_type(parameter), recorded_type(argument)):
                return True
            if again and np.dtype(argument.dtype).kind in "iub":
                return True
    return False


_CARRIED = ("_shape", "_dtype", "_qparams", "_device", "module_type")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if prefix else name
