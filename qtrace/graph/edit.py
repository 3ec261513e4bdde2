"""Editing a flat graph in linear time: edits are collected and written once.

Exprs and nodes are built directly. MegEngine's ``insert_exprs`` would run every inserted module on
zeros (an observer would record them) and re-index the whole graph at each insertion.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from megengine import Tensor
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction, CallMethod, Expr, GetAttr, Input
from megengine.traced_module.node import ModuleNode, Node, TensorNode
from megengine.traced_module.pytree import TreeDef
from megengine.traced_module.traced_module import _is_builtin_name
from megengine.traced_module.utils import _convert_kwargs_to_args

from qtrace.errors import GraphError
from qtrace.graph.inference import TensorType, TypeInference, recorded_type
from qtrace.graph.interface import EndpointEdits
from qtrace.graph.notes import copy_line, move_meta, name_with_line, own_meta
from qtrace.graph.operations import StoredTensor
from qtrace.graph.renewal import renew_behind, same_type, type_of_value, write_type
from qtrace.graph.stepping import write_order
from qtrace.graph.walk import argument_spec, modules_of, op_label, owner, set_arguments, signature

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


# The attribute in which a prepared or converted module carries its quantization record.
RECORD_ATTRIBUTE = "qtrace_record"


class GraphEditor(EndpointEdits):
    """Collects edits of a flat ``TracedModule`` and writes them when the ``with`` block ends.

    New exprs are placed after the expr named by ``after`` (in the order of the calls). Users are rewired at
    once. The end of the block rebuilds the expr list, drops dead exprs and renews ids. It also renews the
    shapes and dtypes after the edits, attributes of layers included (``traced.conv.stride = 2``).

    An exception inside of the block, and an edit after which an op cannot run, restore the graph and the
    attributes of its modules. Values that were written into a Tensor stay.

    The graph of a prepared or converted module is not edited, since its record of quantized sites would not
    fit it any more. Its parameters may be set.

    Args:
        traced: a flat traced module.
        renews_record: whether the caller renews the record of a prepared or converted module.

    Example:
        >>> with GraphEditor(traced) as ed:
        ...     new = ed.call_function(F.relu, node, after=node.expr, like=node)
        ...     ed.replace_uses(node, new)
    """

    def __init__(self, traced: TracedModule, renews_record: bool = False) -> None:
        super().__init__(traced)
        self._may_edit = renews_record or getattr(traced, RECORD_ATTRIBUTE, None) is None
        self._after: dict[Expr, list[Expr]] = {}
        self._front: list[Expr] = []
        self._removed: set[Expr] = set()
        self._attrs: dict[str, Node] = {}
        self._in_front: set[Expr] = set()
        self._suffix: dict[str, int] = {}
        self._before: Snapshot | None = None
        self._inference: TypeInference | None = None
        self._changed: frozenset[Module] = frozenset()
        self._retyped = False
        self._edited: set[Expr] = set()
        self._rewired: dict[Expr, list[tuple[Node, TensorType | None]]] = {}
        for expr in self.graph._exprs:
            if isinstance(expr, GetAttr) and expr.inputs[0] is self.graph._inputs[0]:
                self._attrs.setdefault(expr.name, expr.outputs[0])

    def __enter__(self) -> GraphEditor:
        self._before = Snapshot(self.traced)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._before is not None
        if kind is not None:
            self._before.restore()
            return
        try:
            self.commit()
        except BaseException:
            self._before.restore()
            raise

    def get_attr(self, path: str) -> Node:
        """Returns the node for the attribute at the dotted ``path``; its expr comes before all others.

        Raises:
            GraphError: when the module lacks the attribute.
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
            raise GraphError(f"the module lacks attribute {path!r}: add it before the graph refers to it.")
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
        like: TensorNode | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Adds ``func(*args, **kwargs)`` after the expr ``after``.

        Args:
            func: a function of MegEngine's, or one that its tracer knows.
            *args: nodes and constants.
            after: the expr after which the call stands.
            like: a node with the shape and dtype of the one result; None infers them from the arguments.
            name: the name of the result; a suffix is added to one that is taken.
            **kwargs: nodes and constants.

        Returns:
            The node of the result, or the tuple or list of nodes that the function returns.

        Raises:
            GraphError: when the function does not take these arguments, or cannot run on their shapes.
        """
        expr = CallFunction(func)
        args, kwargs = self._with_nodes(args), self._with_nodes(kwargs)
        try:
            args, kwargs = _convert_kwargs_to_args(argument_spec(func), args, kwargs)
        except (TypeError, ValueError, AssertionError) as error:
            raise GraphError(f"{op_label(expr)} does not take these arguments: {error}.") from error
        set_arguments(expr, args, kwargs)
        return self._place(expr, after, like, name or f"{func.__name__}_out", f"[func_{func.__name__}]")

    def call_module(
        self, path: str, *args: Any, after: Expr, like: TensorNode | None = None, name: str | None = None
    ) -> Any:
        """Adds a call of the submodule at ``path`` after ``after``; the rest is as for `call_function`.

        Raises:
            GraphError: when there is no such module, or it cannot run on the shapes of the arguments.
        """
        callee = self.get_attr(path)
        expr = CallMethod(callee)
        callee.users.remove(expr)  # `set_arguments` adds it again
        set_arguments(expr, (callee, *self._with_nodes(args)), {})
        return self._place(expr, after, like, name or f"{path.replace('.', '_')}_out", f"{path}.[out]")

    def call_method(
        self,
        method: str,
        x: TensorNode,
        *args: Any,
        after: Expr,
        like: TensorNode | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Adds ``x.method(*args, **kwargs)`` after ``after``; the rest is as for `call_function`.

        Raises:
            GraphError: when a Tensor lacks the method, or it cannot run on the shapes of the arguments.
        """
        if not callable(getattr(Tensor, method, None)):
            raise GraphError(f"a Tensor lacks the method {method!r}.")
        expr = CallMethod(x, method)
        x.users.remove(expr)  # `set_arguments` adds it again
        set_arguments(expr, (x, *self._with_nodes(args)), self._with_nodes(kwargs))
        return self._place(expr, after, like, name or f"{method.strip('_')}_out", f"[method_{method}]")

    def _with_nodes(self, value: Any) -> Any:
        """Returns arguments with the node of each parameter of a layer that a match has bound."""
        if isinstance(value, StoredTensor):
            return self.get_attr(value.path)
        if type(value) in (tuple, list):
            return type(value)(map(self._with_nodes, value))
        return {k: self._with_nodes(v) for k, v in value.items()} if type(value) is dict else value

    def copy_expr(self, source: Expr, inputs: Sequence[Node | StoredTensor], after: Expr) -> list[TensorNode]:
        """Adds a copy of ``source``, an expr of another graph, that reads ``inputs``; returns its outputs."""
        expr = copy.copy(source)
        expr.inputs, expr.const_val = self._with_nodes(list(inputs)), copy.copy(source.const_val)
        for node in expr.inputs:
            node.users.append(expr)
        expr.outputs = [copy.copy(node) for node in source.outputs]
        for node in expr.outputs:
            node.expr, node.users, node.actual_node = expr, [], []
            own_meta(node)
            node._qualname = f"{self.graph._qualname}.[{node._name}]"
            node._name = self._unique(node._name, node)
        copy_line(after, expr)
        self._insert(expr, after)
        return list(expr.outputs)

    def _place(self, expr: Expr, after: Expr, like: TensorNode | None, name: str, qualname: str) -> Any:
        copy_line(after, expr)
        kinds, structure = self._infer(expr, name) if like is None else ([recorded_type(like)], None)
        nodes: list[TensorNode] = []
        for kind in kinds:
            node = TensorNode(expr, "", f"{self.graph._qualname}.{qualname}")
            node._device = Tensor(0.0).device if like is None else like.device
            write_type(node, kind)
            node._name = self._unique(name, node)
            nodes.append(node)
        expr.return_val = nodes[0] if structure is None else structure.unflatten(nodes)
        self._insert(expr, after)
        return expr.return_val

    def _infer(self, expr: Expr, name: str) -> tuple[list[TensorType | None], TreeDef | None]:
        """Returns the types of the results of a new expr, and their structure."""
        try:
            values, structure = self._results(expr)
            kinds = [type_of_value(value) for value in values or ()]
            if not kinds or None in kinds:
                raise GraphError(
                    f"{name}: the shape that {op_label(expr)} gives depends on values, so the edit must say "
                    "it: name a node of this shape in `like`."
                )
        except GraphError:
            for node in expr.inputs:
                node.users = [user for user in node.users if user is not expr]
            raise
        return kinds, structure

    def _results(self, expr: Expr) -> tuple[list[Any] | None, TreeDef | None]:
        """Infers results and structure; only an op that fails looks for attributes that were set since."""
        inference = self._inference or self._current_inference()
        try:
            return inference.call(expr, [inference.value(node) for node in expr.inputs])
        except GraphError:
            current = self._current_inference()
            if current is inference:
                raise
            return current.call(expr, [current.value(node) for node in expr.inputs])

    def _current_inference(self) -> TypeInference:
        """Returns an inference that sees the edits so far; it is kept until one changes a recorded type."""
        changed = frozenset() if self._before is None else self._before.changed_modules()
        if self._inference is None or changed != self._changed:
            anew = bool(changed) or self._retyped
            self._inference, self._changed = TypeInference(self.traced, anew), changed
        return self._inference

    def _retype(self) -> None:
        """Notes that an edit may have changed types that nodes record until the edits are written."""
        self._retyped, self._inference = True, None

    def _insert(self, expr: Expr, after: Expr) -> None:
        self._edited.add(expr)
        if isinstance(after, Input) or after in self._in_front:
            self._front.append(expr)
            self._in_front.add(expr)
        else:
            self._after.setdefault(after, []).append(expr)

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

        Raises:
            GraphError: when one of both is no node.
        """
        for node in (old, new):
            if not isinstance(node, Node):
                raise GraphError(f"replace_uses takes two nodes of the graph, not {type(node).__name__}.")
        chosen = None if users is None else set(users)
        if not same_type(recorded_type(old), recorded_type(new)) or self._retyped:
            self._retype()
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
            self._rewired.setdefault(expr, []).append((new, recorded_type(old)))
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
        move_meta(node, new)
        names[node._name] = node

    def set_argument(self, expr: CallFunction, name: str, value: Any) -> None:
        """Sets one argument of a function call by its parameter name.

        Raises:
            GraphError: when ``expr`` calls no function, or its function lacks the argument.
        """
        label = op_label(expr)
        if not isinstance(expr, CallFunction):
            raise GraphError(
                f"{name_with_line(expr, label)} calls no function: for a layer set the attribute of its "
                "module, and replace the call of a method by one of a function."
            )
        parameters = signature(expr.func).parameters
        if name not in parameters:
            raise GraphError(
                f"{name_with_line(expr, label)} takes no argument {name!r}; it takes {', '.join(parameters)}."
            )
        bound = signature(expr.func).bind(*expr.args, **expr.kwargs)
        bound.apply_defaults()
        bound.arguments[name] = value
        for node in expr.inputs:
            node.users = [u for u in node.users if u is not expr]
        set_arguments(expr, bound.args, bound.kwargs)
        self._edited.add(expr)
        self._retype()

    def remove(self, expr: Expr) -> None:
        """Drops ``expr``, whose outputs must be unused when the edits are written."""
        self._removed.add(expr)

    def _check_record(self) -> None:
        before = self._before
        changed = bool(self._edited or self._rewired or self._removed)
        changed = changed or (before is not None and before.has_other_endpoints())
        if changed and not self._may_edit:
            raise GraphError(
                f"{self.graph._name} is prepared or converted, and its record of quantized sites would not "
                "fit the edited graph: edit the float module and prepare that."
            )

    def commit(self) -> None:
        """Writes the collected edits, and renews the shapes and dtypes after them.

        Raises:
            GraphError: when an expr was removed whose output is still used, or an op cannot run.
        """
        self._check_record()
        edited = self._edited | (set() if self._before is None else self._before.changed_calls())
        order: list[Expr] = []
        for start in (*self._front, *(e for e in self.graph._exprs if e not in self._in_front)):
            stack = [start]
            while stack:
                expr = stack.pop()
                order.append(expr)
                stack.extend(reversed(self._after.pop(expr, ())))
        if self._after:
            raise GraphError("an edit was placed after an expr that is not in this graph.")
        write_order(self.traced, order, self._removed)
        renew_behind(self.traced, edited, self._rewired)
