"""Builds a traced graph from nothing: the way in for networks that are not written in MegEngine."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.core._imperative_rt.core2 import apply
from megengine.core.ops.builtin import GetVarShape
from megengine.functional import copy
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, Expr, GetAttr, Input
from megengine.traced_module.node import ModuleNode, Node, TensorNode
from megengine.traced_module.pytree import tree_flatten
from megengine.traced_module.traced_module import InternalGraph, _is_builtin_name
from megengine.traced_module.utils import _convert_kwargs_to_args

from qtrace.errors import GraphError
from qtrace.graph import failures
from qtrace.graph.inference import OpError, TensorType, TypeInference, summarize, type_of, zeros
from qtrace.graph.kernels import MAX_RANK, stored_tensor
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.stepping import finish
from qtrace.graph.tracing.copies import find_copies, insert_copies
from qtrace.graph.tracing.running import engine_for_tracing
from qtrace.graph.walk import argument_spec, op_label, set_arguments, set_positional_graph


class GraphBuilder:
    """Builds a flat `TracedModule` op by op.

    Shapes and dtypes of each op's results are inferred from its inputs, as `qtrace.graph.inference` says. So
    every node knows them, and an op that MegEngine refuses fails where it is added. Kernels run on what does
    not depend on values of the inputs: constants, parameters and sizes; and on zeros where shapes cannot be
    inferred otherwise. If an input has a free batch axis, or other open axes, shapes are inferred a second
    time. That is with one sample more, or with other sizes of the open axes (see `shapes`).

    Example:
        >>> builder = GraphBuilder("Net")
        >>> x = builder.input("x", (1, 3, 32, 32))
        >>> y = builder.call_module("stem.conv", M.Conv2d(3, 8, 3), x)
        >>> net = builder.finish(builder.call_function(F.relu, y, name="features"))

    Args:
        name: the name of the graph.
    """

    def __init__(self, name: str = "Net") -> None:
        self.traced = _new_module()
        self.graph = InternalGraph(name, name)
        self._name = name
        self._suffix: dict[str, int] = {}
        self._attributes: dict[str, Node] = {}
        self._shapes: dict[Node, tuple[tuple[int, ...], ...]] = {}
        # Values that do not depend on the inputs' values, one a probe: parameters, modules, sizes.
        self._values: dict[Node, tuple[Any, ...]] = {}
        self._probes, self._adds_sample = 1, True
        scalar = Tensor(0.0)
        self._device, self._single = scalar.device, tree_flatten(scalar)[1]
        self._inference = TypeInference(self.traced)
        self._self = self._new_input(ModuleNode, "self", name)
        self._self.module_type = TracedModule
        self._values[self._self] = (self.traced,)

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: Any = np.float32,
        batch_axis: int | None = None,
        other: Sequence[int] | None = None,
    ) -> TensorNode:
        """Adds an input of the graph; all inputs come before the first op.

        Args:
            name: the name of the node and of the argument of ``forward``.
            shape: the shape that the graph records.
            dtype: float32, int32, bool or another dtype of MegEngine's.
            batch_axis: an axis whose size may differ when the graph runs; None if all are fixed.
            other: a shape with another size of each axis whose size may differ, instead of ``batch_axis``.

        Raises:
            GraphError: when an op was added already, or MegEngine lacks such a tensor.
        """
        if self.graph._exprs:
            raise GraphError(f"input {name}: add all inputs before the first op.")
        if len(shape) > MAX_RANK:
            raise GraphError(
                f"input {name} has {len(shape)} axes, but MegEngine's tensors have at most {MAX_RANK}."
            )
        node = self._new_input(TensorNode, name, f"{self._name}.[{name}]")
        first = tuple(int(n) for n in shape)
        shapes = [first]
        if batch_axis is not None:
            more = list(first)
            more[batch_axis] += 1
            other = more
        if other is not None and tuple(other) != first:
            shapes.append(tuple(int(n) for n in other))
            self._probes, self._adds_sample = 2, self._adds_sample and batch_axis is not None
        self._record(node, tuple(shapes), np.dtype(dtype))
        return node

    def _new_input(self, kind: type[Node], name: str, qualname: str) -> Any:
        expr = Input(kind, name, qualname)
        (node,) = expr.outputs
        node._name = self._unique(name, node)
        self.graph._inputs.append(node)
        return node

    def shapes(self, node: TensorNode) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of ``node`` as recorded, and at the other sizes if axes are open.

        Args:
            node: a node of this graph.
        """
        shapes = self._shapes[node]
        return shapes if len(shapes) == self._probes else shapes * self._probes

    def known_values(self, node: TensorNode) -> tuple[np.ndarray, ...]:
        """Returns the values of ``node`` as recorded, and at the other sizes; () if inputs decide them.

        Args:
            node: a node of this graph.
        """
        return tuple(value.numpy() for value in self._values.get(node, ()))

    def parameter(self, path: str, value: np.ndarray, trainable: bool = True) -> TensorNode:
        """Adds a tensor to the module at the dotted ``path``, and reads it.

        Args:
            path: the path; containers on the way are made.
            value: the values.
            trainable: whether it is a Parameter.

        Raises:
            GraphError: when the path is used already.
        """
        tensor = stored_tensor(value, trainable)
        self._attach(path, tensor)
        return self._attribute(path)

    def attribute(self, path: str) -> Node:
        """Returns the node that reads the tensor or module at ``path``.

        Raises:
            GraphError: when there is none.
        """
        return self._attribute(path)

    def call_function(
        self,
        function: Callable[..., Any],
        *args: Any,
        name: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Adds ``function(*args, **kwargs)``; nodes stand for tensors in the arguments.

        Args:
            function: a function of MegEngine's, or one that its tracer knows.
            *args: nodes and constants.
            name: the name of the output, or one name an output; a suffix is added to one that is taken.
            **kwargs: nodes and constants.

        Returns:
            The node of the result, or a tuple or list of nodes as the function returns them.

        Raises:
            GraphError: when the function fails on these shapes.
        """
        expr = CallFunction(function)
        args, kwargs = _convert_kwargs_to_args(argument_spec(function), args, kwargs)
        set_arguments(expr, args, kwargs)
        return self._add(expr, name or f"{function.__name__}_out", f"[func_{function.__name__}]")

    def call_method(
        self, method: str, *args: Any, name: str | Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        """Adds a call of a Tensor's method; ``args[0]`` is the node of the tensor. See `call_function`.

        Raises:
            GraphError: when the method fails on these shapes.
        """
        expr = CallMethod(args[0], method)
        args[0].users.pop()  # `set_arguments` adds it again
        set_arguments(expr, args, kwargs)
        return self._add(expr, name or f"{method.strip('_')}_out", f"[method_{method.strip('_')}]")

    def call_kernel(self, opdef: Any, *args: Any, name: str | Sequence[str] | None = None) -> Any:
        """Adds a call of a kernel of MegEngine's, such as ``GetVarShape``. See `call_function`.

        Returns:
            The node of its result, or a tuple of nodes if it has several.

        Raises:
            GraphError: when the kernel fails on these shapes.
        """
        expr = Apply(opdef)
        expr.inputs = list(args)
        for node in args:
            node.users.append(expr)
        return self._add(expr, name or f"{type(opdef).__name__.lower()}_out", "[]")

    def constant(self, value: Tensor, name: str | None = None) -> TensorNode:
        """Adds a constant of the graph, which is no attribute of the module."""
        expr = Constant(value)
        node = expr.outputs[0]
        node._name = self._unique(name or "const", node)
        node._qualname = f"{self._name}.[{node._name}]"
        self._values[node] = (value,)
        self._record(node, (tuple(int(n) for n in value.shape),), value.dtype, value.device)
        self.graph._exprs.append(expr)
        return node

    def mark(self) -> int:
        """Returns the number of ops so far, for `release_names`."""
        return len(self.graph._exprs)

    def release_names(self, mark: int) -> None:
        """Gives back the names of the results of all ops since a mark, which nothing reads.

        Args:
            mark: what `mark` returned.
        """
        used = self.graph._namespace.used_names
        for expr in self.graph._exprs[mark:]:
            for node in () if isinstance(expr, GetAttr) else expr.outputs:
                used.pop(node._name, None)
                self._suffix.pop(node._name, None)
                node._name = self._unique("unread", node)

    def swap_names(self, first: TensorNode, second: TensorNode) -> None:
        """Gives each of two nodes the name of the other."""
        used = self.graph._namespace.used_names
        first._name, second._name = second._name, first._name
        used[first._name], used[second._name] = first, second

    def size(self, node: TensorNode, axis: int, name: str | None = None) -> TensorNode:
        """Adds the size of an axis, read when the graph runs, as an int32 tensor without axes.

        Args:
            node: the tensor.
            axis: the axis.
            name: the name of the size.
        """
        shape = self.call_kernel(GetVarShape(), node, name=f"{node._name}_shape")
        return self.call_method("__getitem__", shape, axis, name=name or f"{node._name}_size_{axis}")

    def add_module(self, path: str, module: Module) -> ModuleNode:
        """Adds a module of MegEngine's own at the dotted ``path``, in eval mode.

        Args:
            path: the path; containers on the way are made.
            module: the module, which may be called several times.

        Raises:
            GraphError: when the path is used already.
        """
        module.eval()
        self._attach(path, module)
        return self._attribute(path)

    def call_module(
        self,
        path: str,
        module: Module | None,
        *args: Any,
        name: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Adds a call of the module at ``path``, which is added first unless ``module`` is None.

        Raises:
            GraphError: when the path is used already, or the module fails on these shapes.
        """
        callee = self._attribute(path) if module is None else self.add_module(path, module)
        expr = CallMethod(callee)
        callee.users.pop()
        set_arguments(expr, (callee, *args), kwargs)
        return self._add(expr, name or f"{path.replace('.', '_')}_out", f"{path}.[out]")

    def finish(self, outputs: Any, copy_views: bool = True) -> TracedModule:
        """Returns the module, in eval mode; the builder must not be used any more.

        Where a kernel of MegEngine's would compute wrong values from a view, the view is copied first.

        Args:
            outputs: what forward returns: a node, or tuples, lists and dicts of nodes.
            copy_views: whether views are copied; else the caller does so, once the graph is changed.

        Raises:
            GraphError: when an output is no node of this graph.
        """
        try:
            leaves, out_def = tree_flatten(outputs, is_leaf=lambda leaf: isinstance(leaf, Node))
        except AssertionError:  # MegEngine knows no such structure
            raise GraphError(f"{outputs!r} is not a node of this graph: return nodes only.") from None
        for leaf in leaves:
            if not isinstance(leaf, Node) or leaf not in self._shapes:
                raise GraphError(f"{leaf} is not a node of this graph: return nodes only.")
        self.graph._outputs[:] = leaves
        set_positional_graph(self.traced, self.graph, out_def)
        finish(self.traced)
        if copy_views:
            insert_copies(self.traced, find_copies(self.traced))
        self.traced.eval()
        return self.traced

    def _add(self, expr: Expr, name: str | Sequence[str], qualname: str) -> Any:
        """Appends ``expr``, with nodes for what it returns."""
        results = [self._results(expr, probe) for probe in range(self._runs(expr))]
        leaves, out_def = results[0]
        for leaf in leaves:
            if not isinstance(leaf, (RawTensor, TensorType)):
                raise GraphError(f"{name} returns a {type(leaf).__name__}: only tensors can be nodes.")
        nodes: list[TensorNode] = []
        for index, leaf in enumerate(leaves):
            node = TensorNode(expr, "", f"{self._name}.{qualname}")
            chosen = name if isinstance(name, str) else name[min(index, len(name) - 1)]
            node._name = self._unique(chosen, node)
            values = tuple(other[index] for other, _ in results)
            shapes = tuple(tuple(int(n) for n in value.shape) for value in values)
            self._record(node, shapes, leaf.dtype, getattr(leaf, "device", None))
            if isinstance(leaf, RawTensor):
                self._values[node] = values
            nodes.append(node)
        expr.outputs, expr.out_def = nodes, out_def
        self.graph._exprs.append(expr)
        return nodes[0] if out_def is self._single else out_def.unflatten(nodes)

    def _runs(self, expr: Expr) -> int:
        counts = (max(len(self._shapes.get(n, ())), len(self._values.get(n, ()))) for n in expr.inputs)
        return max(counts, default=1)

    def _results(self, expr: Expr, probe: int) -> tuple[list[Any], Any]:
        """Returns what ``expr`` returns at the sizes of ``probe``, and its structure.

        A result is a tensor where it does not depend on values of the inputs, else a `TensorType`.
        """
        values = [self._value(node, probe) for node in expr.inputs]
        known = not any(isinstance(value, TensorType) for value in values)
        if not known and not _is_assignment(expr):
            try:
                leaves, structure = self._inference.call(expr, [summarize(value) for value in values])
            except OpError as error:
                raise self._failure(expr, values, probe, error.__cause__ or error) from error
            if leaves is not None and structure is not None and all(leaf is not None for leaf in leaves):
                single = isinstance(expr, Apply) and len(leaves) == 1
                return leaves, self._single if single else structure
        try:
            with engine_for_tracing():
                tensors = [zeros(v) if isinstance(v, TensorType) else v for v in values]
                op = tensors[0] if tensors else None
                if isinstance(op, OpaqueOp):
                    stored = [i for i, v in enumerate(values[1:]) if not isinstance(v, TensorType)]
                    result = op(*tensors[1:]) if known else op.stand_in(*tensors[1:], known=stored)
                else:
                    result = _call(expr, tensors)
                leaves, structure = tree_flatten(result)
        except Exception as error:  # MegEngine's kernels raise errors of many classes
            raise self._failure(expr, values, probe, error) from error
        return leaves if known else [type_of(leaf) or leaf for leaf in leaves], structure

    def _failure(self, expr: Expr, values: Sequence[Any], probe: int, error: BaseException) -> GraphError:
        pairs = zip(expr.inputs, values, strict=True)
        shown = ((n._name, v) for n, v in pairs if isinstance(v, (RawTensor, TensorType)))
        shapes = ", ".join(f"{name} {tuple(int(n) for n in value.shape)}" for name, value in shown)
        more = (" with one sample more" if self._adds_sample else " at another size") if probe else ""
        return GraphError(
            f"{op_label(expr)} fails on {shapes or 'its arguments'}{more}: {failures.short(error)}"
        )

    def _value(self, node: Node, probe: int) -> Any:
        if node in self._values:
            known = self._values[node]
            return known[min(probe, len(known) - 1)]
        shapes = self._shapes[node]
        return TensorType(shapes[min(probe, len(shapes) - 1)], node.dtype)

    def _record(
        self, node: TensorNode, shapes: tuple[tuple[int, ...], ...], dtype: Any, device: Any = None
    ) -> None:
        self._shapes[node] = shapes if len(set(shapes)) > 1 else shapes[:1]
        node._shape, node._dtype = shapes[0], dtype
        node._device = self._device if device is None else device

    def _attribute(self, path: str) -> Any:
        if path in self._attributes:
            return self._attributes[path]
        value: Any = self.traced
        for part in path.split("."):
            value = getattr(value, part, None)
        if value is None:
            raise GraphError(f"the module lacks attribute {path!r}: add it before the graph refers to it.")
        kind = ModuleNode if isinstance(value, Module) else TensorNode
        expr = GetAttr(self._self, kind, path, "")
        node = expr.outputs[0]
        node._name = self._unique(path, node)
        node._qualname = f"{self._name}.{path}"
        self._values[node] = (value,)
        if kind is ModuleNode:
            node.module_type = type(value)
        else:
            self._record(node, (tuple(int(n) for n in value.shape),), value.dtype, value.device)
        self.graph._exprs.append(expr)
        self._attributes[path] = node
        return node

    def _attach(self, path: str, value: Tensor | Module) -> None:
        *parents, name = path.split(".")
        module = self.traced
        for part in parents:
            child = getattr(module, part, None)
            if child is None:
                child = _new_module()
                setattr(module, part, child)
            if not isinstance(child, TracedModule):
                raise GraphError(f"{path}: {part!r} is no container; choose another path.")
            module = child
        if getattr(module, name, None) is not None:
            raise GraphError(f"the module has an attribute {path!r} already: choose another name.")
        setattr(module, name, value)

    def _unique(self, name: str, node: Node | None = None) -> str:
        base = re.sub(r"\W+", "_", name) or "value"
        base = f"_{base}" if base[0].isdigit() else base
        used = self.graph._namespace.used_names
        count, candidate = self._suffix.get(base, 0), base
        while used.get(candidate) is not None or _is_builtin_name(candidate):
            count += 1
            candidate = f"{base}_{count}"
        self._suffix[base] = count
        used[candidate] = node
        return candidate


def _new_module() -> TracedModule:
    return TracedModule(False, {}, {})


def _is_assignment(expr: Expr) -> bool:
    return isinstance(expr, CallMethod) and bool(expr.method == "__setitem__")


def _call(expr: Expr, values: Sequence[Any]) -> Any:
    """Calls the op of ``expr`` on tensors and modules."""
    if isinstance(expr, Apply):
        results = apply(expr.opdef, *values)
        return results[0] if len(results) == 1 else tuple(results)
    args, kwargs = expr.unflatten_args(values)
    if isinstance(expr, CallFunction):
        return expr.func(*args, **kwargs)
    if _is_assignment(expr):  # its node is the tensor that it writes into
        target = copy(args[0])  # it may be a parameter
        target[args[1]] = args[2]
        return target
    return getattr(args[0], expr.method)(*args[1:], **kwargs)
