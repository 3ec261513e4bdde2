"""Editing a flat graph in linear time: edits are collected and written once.

Exprs and nodes are built directly. MegEngine's ``insert_exprs`` would run every inserted module on
zeros (an observer would record them) and re-index the whole graph at each insertion.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction, CallMethod, Expr, GetAttr, Input
from megengine.traced_module.node import ModuleNode, Node, TensorNode
from megengine.traced_module.pytree import tree_flatten
from megengine.traced_module.traced_module import _is_builtin_name
from megengine.traced_module.utils import _convert_kwargs_to_args

from qtrace.errors import GraphError
from qtrace.graph.source_lines import copy_line

__all__ = [
    "GraphEditor",
    "add_submodule",
    "delete_attribute",
    "exchange_function",
    "finish",
    "set_parameter",
]


class GraphEditor:
    """Collects edits of a flat ``TracedModule`` and writes them when the ``with`` block ends.

    An exception inside of the block restores the graph.

    New exprs are placed after the expr named by ``after`` (in the order of the calls). Users are rewired at
    once. The end of the block rebuilds the expr list, drops dead exprs and renews ids.

    Example:
        >>> with GraphEditor(traced) as ed:
        ...     new = ed.call_function(F.relu, node, after=node.expr, like=node)
        ...     ed.replace_uses(node, new)
    """

    def __init__(self, traced: TracedModule) -> None:
        self.traced = traced
        self.graph = traced.graph
        self._after: dict[Expr, list[Expr]] = {}
        self._front: list[Expr] = []
        self._removed: set[Expr] = set()
        self._attrs: dict[str, Node] = {}
        self._in_front: set[Expr] = set()
        self._suffix: dict[str, int] = {}
        for expr in self.graph._exprs:
            if isinstance(expr, GetAttr) and expr.inputs[0] is self.graph._inputs[0]:
                self._attrs.setdefault(expr.name, expr.outputs[0])

    def __enter__(self) -> GraphEditor:
        self._before = _Snapshot(self.graph)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._before.restore()
            return
        try:
            self.commit()
        except GraphError:
            self._before.restore()
            raise

    def get_attr(self, path: str) -> Node:
        """Returns the node for the attribute at the dotted ``path``; its expr comes before all others.

        Raises:
            GraphError: when the module has no such attribute.
        """
        node = self._attrs.get(path)
        if node is None:
            node = self._new_attr(path)
        if node.expr not in self._in_front:
            self._in_front.add(node.expr)
            self._front.append(node.expr)
        return node

    def _new_attr(self, path: str) -> Node:
        value: Any = self.traced
        for part in path.split("."):
            value = getattr(value, part, None)
        if value is None:
            raise GraphError(f"the module has no attribute {path!r}: add it before the graph refers to it.")
        kind = ModuleNode if isinstance(value, Module) else TensorNode
        expr = GetAttr(self.graph._inputs[0], kind, path, "")
        node = expr.outputs[0]
        if kind is ModuleNode:
            node.module_type = type(value)
        else:
            node._shape, node._dtype, node._device = tuple(value.shape), value.dtype, value.device
        node._qualname = f"{self.graph._qualname}.{path}"
        node._name = self._unique(path.replace(".", "_"), node)
        self._attrs[path] = node
        return node

    def call_function(
        self,
        func: Callable[..., Any],
        *args: Any,
        after: Expr,
        like: TensorNode,
        name: str | None = None,
        **kwargs: Any,
    ) -> TensorNode:
        """Adds ``func(*args, **kwargs)`` after ``after``; its one output has shape and dtype of ``like``."""
        expr = CallFunction(func)
        args, kwargs = _convert_kwargs_to_args(_argspec(func), args, kwargs)
        self._set_arguments(expr, args, kwargs)
        return self._place(expr, after, like, name or f"{func.__name__}_out", f"[func_{func.__name__}]")

    def call_module(
        self, path: str, *args: Any, after: Expr, like: TensorNode, name: str | None = None
    ) -> TensorNode:
        """Adds a call of the submodule at ``path`` after ``after``; its output is shaped as ``like``."""
        callee = self.get_attr(path)
        expr = CallMethod(callee)
        callee.users.remove(expr)  # `_set_arguments` adds it again
        self._set_arguments(expr, (callee, *args), {})
        return self._place(expr, after, like, name or f"{path.replace('.', '_')}_out", f"{path}.[out]")

    @staticmethod
    def _set_arguments(expr: Expr, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, expr.arg_def = tree_flatten((tuple(args), kwargs))
        expr.inputs, expr.const_val = [], []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Node):
                expr.inputs.append(leaf)
                leaf.users.append(expr)
            else:
                expr.const_val.append((index, leaf))

    def _place(self, expr: Expr, after: Expr, like: TensorNode, name: str, qualname: str) -> TensorNode:
        node = TensorNode(expr, "", f"{self.graph._qualname}.{qualname}", like.shape, like.dtype)
        node._device = like.device
        expr.return_val = node
        copy_line(after, expr)
        node._name = self._unique(name, node)
        if isinstance(after, Input) or after in self._in_front:
            self._front.append(expr)
            self._in_front.add(expr)
        else:
            self._after.setdefault(after, []).append(expr)
        return node

    def _unique(self, name: str, node: Node) -> str:
        # MegEngine's own search starts at suffix 1 each time: quadratic for a thousand equal names.
        base = re.sub(r"\W+", "_", name)
        base = f"_{base}" if base[0].isdigit() else base
        used = self.graph._namespace.used_names
        count, candidate = self._suffix.get(base, 0), base
        while count or used.get(candidate) is not None or _is_builtin_name(candidate):
            count += 1
            candidate = f"{base}_{count}"
            if used.get(candidate) is None:
                break
        self._suffix[base] = count
        used[candidate] = node
        return candidate

    def replace_uses(
        self, old: Node, new: Node, users: Iterable[Expr] | None = None, outputs: bool = True
    ) -> None:
        """Replaces ``old`` by ``new`` in the inputs of exprs.

        Args:
            old: the node that is read now.
            new: the node to read; its own expr is never rewired.
            users: the exprs to rewire; None for all users of ``old``.
            outputs: whether graph outputs are replaced too (only when ``users`` is None).
        """
        chosen = None if users is None else set(users)
        remaining: list[Expr] = []
        moved: dict[Expr, None] = {}  # each once, in order
        for expr in old.users:
            if expr is new.expr or (chosen is not None and expr not in chosen):
                remaining.append(expr)
            else:
                moved[expr] = None
                new.users.append(expr)
        old.users = remaining
        for expr in moved:
            expr.inputs = [new if n is old else n for n in expr.inputs]
        if users is None and outputs:
            self.graph._outputs[:] = [new if n is old else n for n in self.graph._outputs]

    def replace_expr(self, old: Expr, new: TensorNode) -> None:
        """Replaces the one output of ``old`` by ``new``, which takes its name, and drops ``old``."""
        (node,) = old.outputs
        self.put_in_place(new, node)
        self.remove(old)

    def put_in_place(self, new: TensorNode, node: TensorNode) -> None:
        """Replaces ``node`` by ``new``, which takes its name, in all readers; commit drops dead exprs."""
        self.replace_uses(node, new)
        names = self.graph._namespace.used_names
        names[new._name] = None
        names[node._name] = new
        new._name, node._name, new._qualname = node._name, new._name, node._qualname
        names[node._name] = node

    def set_argument(self, expr: CallFunction, name: str, value: Any) -> None:
        """Sets one argument of a function call by its parameter name."""
        bound = signature(expr.func).bind(*expr.args, **expr.kwargs)
        bound.apply_defaults()
        bound.arguments[name] = value
        for node in expr.inputs:
            node.users = [u for u in node.users if u is not expr]
        self._set_arguments(expr, bound.args, bound.kwargs)

    def remove(self, expr: Expr) -> None:
        """Drops ``expr``, whose outputs must be unused when the edits are written."""
        self._removed.add(expr)

    def commit(self) -> None:
        """Writes the collected edits.

        Raises:
            GraphError: when an expr was removed whose output is still used.
        """
        order: list[Expr] = []
        for start in (*self._front, *(e for e in self.graph._exprs if e not in self._in_front)):
            stack = [start]
            while stack:
                expr = stack.pop()
                order.append(expr)
                stack.extend(reversed(self._after.pop(expr, ())))
        if self._after:
            raise GraphError("an edit was placed behind an expr that is not in this graph.")
        self._check_order(order)
        self.graph._exprs = [e for e in order if e not in self._removed]
        for expr in order:
            if expr in self._removed:
                self._unlink(expr)
        finish(self.traced)

    def _check_order(self, order: list[Expr]) -> None:
        """Refuses a node that is read before it is produced: dropping dead exprs would lose its producer."""
        unproduced = {n for e in order for n in e.outputs}
        for expr in order:
            node = next((n for n in expr.inputs if n in unproduced), None)
            if node is not None and expr not in self._removed:
                raise GraphError(f"{expr} reads {node._name}, which is produced later: move it up.")
            unproduced.difference_update(n for n in expr.outputs)

    def _unlink(self, expr: Expr) -> None:
        outputs = set(self.graph._outputs)
        for node in expr.outputs:
            readers = [u for u in node.users if u not in self._removed]
            if readers or node in outputs:
                raise GraphError(
                    f"{node._name} cannot be removed: it is still used by {readers or 'the outputs'}."
                )
            self.graph._namespace.unassociate_name_with_obj(node)
        for node in expr.inputs:
            node.users = [u for u in node.users if u is not expr]


class _Snapshot:
    """A copy of all that an editor changes before it commits: users, inputs, arguments, outputs, names."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.outputs = list(graph._outputs)
        self.names = dict(graph._namespace._used_names)
        self.order = list(graph._exprs)
        self.exprs = [(e, list(e.inputs), e.const_val, e.arg_def) for e in graph._exprs]
        nodes = [*graph._inputs, *(n for e in graph._exprs for n in e.outputs)]
        self.nodes = [(n, list(n.users), n._name, n._qualname) for n in nodes]

    def restore(self) -> None:
        """Restores the graph, its exprs and its nodes."""
        self.graph._outputs[:] = self.outputs
        self.graph._namespace._used_names = self.names
        self.graph._exprs = self.order
        for expr, inputs, const_val, arg_def in self.exprs:
            expr.inputs, expr.const_val, expr.arg_def = inputs, const_val, arg_def
        for node, users, name, qualname in self.nodes:
            node.users, node._name, node._qualname = users, name, qualname


@functools.lru_cache(maxsize=256)
def signature(func: Callable[..., Any]) -> inspect.Signature:
    """Returns the cached signature of a MegEngine function, which `inspect` takes a millisecond to find."""
    return inspect.signature(inspect.unwrap(func))


@functools.lru_cache(maxsize=256)
def _argspec(func: Callable[..., Any]) -> inspect.FullArgSpec:
    return inspect.getfullargspec(inspect.unwrap(func))


def finish(traced: TracedModule) -> None:
    """Drops dead exprs and renews users, back references and ids, in time linear in the exprs."""
    graph = traced.graph
    live = set(graph._outputs)
    live_exprs: list[Expr] = []
    for expr in reversed(graph._exprs):
        if expr._disable_remove or not expr.outputs or any(n in live for n in expr.outputs):
            live_exprs.append(expr)
            live.update(n for n in expr.inputs)
        else:
            for node in expr.outputs:
                graph._namespace.used_names[node._name] = None
    live_exprs.reverse()
    graph._exprs = live_exprs
    users: dict[Node, list[Expr]] = {}
    for expr in live_exprs:
        for node in expr.inputs:
            users.setdefault(node, []).append(expr)
    for node in (*graph._inputs, *(n for e in live_exprs for n in e.outputs)):
        node.users = users.get(node, [])
    traced._update_ref()
    graph._reset_ids()


def exchange_function(traced: TracedModule, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replaces the function ``old`` by ``new``, which takes the same arguments, in every call."""
    for expr in traced.graph._exprs:
        if isinstance(expr, CallFunction) and expr.func is old:
            expr.func = new


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
    """Sets the attribute at the dotted ``path`` to a Parameter, a Tensor or None."""
    parent, name = _parent(traced, path)
    setattr(parent, name, value)


def delete_attribute(traced: TracedModule, path: str) -> None:
    """Deletes the submodule or tensor at the dotted ``path``, and the parents that are empty afterwards."""
    parent, name = _parent(traced, path)
    delattr(parent, name)
    parent_path = path.rpartition(".")[0]
    if parent_path and not any(True for _ in parent._flatten(recursive=False)):
        delete_attribute(traced, parent_path)


def _parent(traced: TracedModule, path: str) -> tuple[Module, str]:
    *parts, name = path.split(".")
    parent: Any = traced
    for part in parts:
        parent = getattr(parent, part, None)
        if not isinstance(parent, Module):
            raise GraphError(f"the module has no submodule {part!r} on the way to {path!r}.")
    return parent, name
