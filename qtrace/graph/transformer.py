"""Maps a graph op by op into a new one: the base class for rewrites that look at every op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megengine import Parameter, Tensor
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, Expr, GetAttr
from megengine.traced_module.node import ModuleNode, Node, TensorNode
from megengine.traced_module.pytree import tree_flatten

from qtrace.errors import GraphError
from qtrace.graph.builder import GraphBuilder
from qtrace.graph.flatten import flatten
from qtrace.graph.notes import copy_line, move_meta, name_with_line
from qtrace.graph.passes import RemoveDeadCode
from qtrace.graph.walk import check_traced, get_module, op_label, owner, set_graph


class Transformer:
    """Builds a copy of a float graph; a subclass overrides how one sort of op is written.

    Each hook gets the op with the new nodes as its arguments, and returns the node of its result, or nodes
    in the structure of its result. It may write any number of ops with ``self.builder``, or none: ``return
    args[0]`` drops an op. A node that the hook writes takes the name and the notes (`meta`) of the old one.
    Each op runs once on zeros of its inputs' shapes. If no hook is overridden, the new graph computes what
    the old one does, bit for bit.

    Attributes that no expr reads are left out, as is all that is no tensor or module, such as the record of a
    prepared graph.

    Example:
        >>> class NoSilu(Transformer):
        ...     def call_function(self, function, args, kwargs):
        ...         if function is F.silu:
        ...             return self.builder.call_function(F.hswish, args[0])
        ...         return super().call_function(function, args, kwargs)
        >>> new = NoSilu(traced).run()

    Args:
        traced: a traced module, flat or hierarchical; it is not changed.

    Attributes:
        source: the flat copy that is read.
        builder: the builder of the new graph.
        expr: the expr of ``source`` that is being mapped.

    Raises:
        GraphError: when ``traced`` is not a traced module.
    """

    def __init__(self, traced: TracedModule) -> None:
        check_traced(traced, "a Transformer takes")
        self.source = flatten(traced)
        self.builder = GraphBuilder(self.source.graph._name)
        self.expr: Expr = self.source.graph._inputs[0].expr
        self._new: dict[Node, Any] = {}

    @property
    def names(self) -> list[str]:
        """The names of the outputs of the expr that is being mapped."""
        return [str(node._name) for node in self.expr.outputs]

    def call_function(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Writes a call of a function."""
        return self.builder.call_function(function, *args, name=self.names, **kwargs)

    def call_method(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Writes a call of a Tensor's method; ``args[0]`` is the tensor."""
        return self.builder.call_method(method, *args, name=self.names, **kwargs)

    def call_module(self, path: str, module: Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Writes a call of the module at ``path``; ``args`` are without the module."""
        return self.builder.call_module(path, None, *args, name=self.names, **kwargs)

    def call_kernel(self, opdef: Any, args: Sequence[Any]) -> Any:
        """Writes a call of a kernel that the tracer recorded without its function."""
        return self.builder.call_kernel(opdef, *args, name=self.names)

    def attribute(self, path: str, value: Tensor) -> TensorNode:
        """Writes a parameter or buffer."""
        if self._is_inside_module(path):
            return self.builder.attribute(path)
        return self.builder.parameter(path, value.numpy(), trainable=isinstance(value, Parameter))

    def constant(self, value: Tensor) -> TensorNode:
        """Writes a constant of the trace."""
        return self.builder.constant(value, self.names[0])

    def run(self) -> TracedModule:
        """Maps the whole graph and returns the new module, in eval mode, with the signature of the old one.

        Raises:
            GraphError: when an op fails on the shapes of its new inputs, or a hook does not return as many
                nodes as the op has outputs.
        """
        graph, traced = self.source.graph, self.source
        self._new[graph._inputs[0]] = self.builder.graph._inputs[0]
        for node in graph._inputs[1:]:
            new = self.builder.input(node._name, tuple(int(n) for n in node.shape), node.dtype)
            self._new[node] = new
        modules = [e for e in graph._exprs if isinstance(e, GetAttr) and isinstance(e.outputs[0], ModuleNode)]
        for expr in modules:  # before their parameters, which may be read by themselves
            self._new[expr.outputs[0]] = self.builder.add_module(expr.name, get_module(traced, expr.name))
        for old, new in self._new.items():
            move_meta(old, new)
        for expr in graph._exprs:
            if expr.outputs and expr.outputs[0] in self._new:
                continue
            start = len(self.builder.graph._exprs)
            self.expr = expr
            result = self._map(expr)
            written = self.builder.graph._exprs[start:]
            self._store(expr, result, written)
            for new in written:
                copy_line(expr, new)
        mapped = self.builder.finish(tuple(self._new[node] for node in graph._outputs))
        ((arg_def, out_def),) = traced.argdef_outdef_map.items()
        set_graph(mapped, self.builder.graph, arg_def, out_def, traced.argspec)
        RemoveDeadCode().change(mapped)  # modules whose calls the hooks dropped
        return mapped

    def _map(self, expr: Expr) -> Any:
        """Calls the hook of ``expr`` on the new nodes."""
        if isinstance(expr, GetAttr):
            return self.attribute(expr.name, get_module(self.source, expr.name))
        if isinstance(expr, Constant):
            return self.constant(expr.value)
        inputs = [self._new[node] for node in expr.inputs]
        if isinstance(expr, Apply):
            return self.call_kernel(expr.opdef, inputs)
        args, kwargs = expr.unflatten_args(inputs)
        if isinstance(expr, CallFunction):
            return self.call_function(expr.func, args, kwargs)
        if not isinstance(expr, CallMethod):
            raise GraphError(f"%{expr._id} ({op_label(expr)}) is no call: a Transformer cannot map it.")
        module = owner(expr)
        if module is not None:
            return self.call_module(expr.inputs[0].expr.name, module, args[1:], kwargs)
        return self.call_method(expr.method, args, kwargs)

    def _store(self, expr: Expr, result: Any, written: Sequence[Expr]) -> None:
        """Lets the results stand for the outputs of ``expr``; those in ``written`` take names and notes."""
        leaves = _nodes(result)
        if len(leaves) != len(expr.outputs):
            where = name_with_line(expr, op_label(expr)) if expr.outputs else op_label(expr)
            raise GraphError(
                f"the hook for {where} returned {result!r}: return one node for each of its "
                f"{len(expr.outputs)} results."
            )
        for old, new in zip(expr.outputs, leaves, strict=True):
            self._new[old] = new
            if new.expr in written:
                self._take_name(new, str(old._name))
                move_meta(old, new)

    def _take_name(self, node: TensorNode, name: str) -> None:
        """Gives ``node`` the name ``name`` if no node of the new graph that stands for another has it."""
        used = self.builder.graph._namespace.used_names
        if node._name == name or used.get(name) is not None:
            return
        used[node._name] = None
        node._name = name
        used[name] = node

    def _is_inside_module(self, path: str) -> bool:
        """Returns whether a module that was added as a whole holds the tensor at ``path``."""
        value: Any = self.builder.traced
        for part in path.split("."):
            value = getattr(value, part, None)
        return value is not None


def _nodes(result: Any) -> list[TensorNode]:
    """Returns the nodes in what a hook returned; none if it returned anything else."""
    try:
        leaves = tree_flatten(result, is_leaf=lambda leaf: isinstance(leaf, Node))[0]
    except AssertionError:  # MegEngine knows no such structure
        return []
    return leaves if all(isinstance(leaf, TensorNode) for leaf in leaves) else []
