"""An interpreter to subclass: runs a traced graph expr by expr, with a hook at every node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import megengine.functional as F
import numpy as np
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallMethod, Expr, GetAttr
from megengine.traced_module.node import Node, TensorNode
from megengine.traced_module.pytree import LeafDef, TreeDef, tree_flatten
from megengine.traced_module.traced_module import InternalGraph
from megengine.traced_module.utils import _convert_kwargs_to_args

from qtrace.errors import GraphError
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.graph.failures import describe_failure
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.tensors import PART_BYTES, large_reads
from qtrace.graph.walk import IN_PLACE, called_graph, owner, updates_inputs
from qtrace.process import LargeFrees, synchronize

__all__ = [
    "ENGINE_ERRORS",
    "Interpreter",
    "interpret",
    "last_uses",
    "locate_failure",
    "locate_failure_of",
    "round_late",
]

# What MegEngine raises where an op does not take its inputs.
ENGINE_ERRORS = (AssertionError, RuntimeError, TypeError, ValueError)


class Interpreter:
    """Runs a traced module with bit-identical results, unless a subclass overrides a hook.

    ``run_expr`` computes one expr and ``on_node`` sees, and may replace, every value. A call of a submodule
    in a hierarchical graph is one expr. Values are freed after their last use, and the memory of roundings of
    large parameters is given back.

    Example:
        >>> class Ranges(Interpreter):
        ...     def on_node(self, node, value):
        ...         if isinstance(node, TensorNode):
        ...             print(node.name, value.min(), value.max())
        ...         return value
        >>> Ranges(traced).run(x)

    Args:
        traced: the traced module to run, flat or hierarchical.
        waits: whether to wait for MegEngine now and then. It allocates the results of all ops that it is
            given, long before it computes them and can free others: a batch of roundings takes ten times the
            memory. A hook that reads values waits by itself.

    Raises:
        GraphError: when ``traced`` is not a traced module.
    """

    def __init__(self, traced: TracedModule, waits: bool = False) -> None:
        if not isinstance(traced, TracedModule):
            raise GraphError(f"an Interpreter runs a TracedModule, not a {type(traced).__name__}.")
        self.traced = traced
        self._memory = LargeFrees(PART_BYTES // 4)  # several times as much is on the way
        self._waits, self._given = waits, 0

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes the outputs of ``expr``, in the order of ``expr.outputs``; None for an op without outputs.

        Args:
            expr: the expr; a ``GetAttr`` or ``Constant`` too.
            inputs: the values of ``expr.inputs``: Tensors, and Modules where a module is called or passed.
        """
        return interpret(expr, inputs)

    def on_node(self, node: Node, value: Any) -> Any:
        """Hook that receives every value, graph inputs included, and returns the value to use instead.

        Args:
            node: a ``TensorNode``, or a ``ModuleNode`` with a Module as its value.
            value: the computed value of ``node``.
        """
        return value

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph on the arguments of the module's forward, and returns the result of forward.

        The message of an error of MegEngine's has the node of the op that failed and its source line.

        Raises:
            GraphError: when the arguments do not have the structure that was traced.
        """
        arg_def, outputs = self._run_bound(args, kwargs)
        return self.traced.argdef_outdef_map[arg_def].unflatten(outputs)

    def run_flat(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Does what `run` does, and returns the values of the graph's outputs in their order."""
        return self._run_bound(args, kwargs)[1]

    def _run_bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TreeDef, list[Any]]:
        """Returns the key of the graph for these arguments, and what `run_flat` does."""
        arg_def, inputs = self.bind(args, kwargs)
        try:
            return arg_def, self.run_all(self.traced.argdef_graph_map[arg_def], inputs)
        except ENGINE_ERRORS as error:
            if problem := locate_failure(self.traced, *args, **kwargs):
                error.args = (problem,)
            raise

    def run_all(self, graph: InternalGraph, inputs: list[Any]) -> list[Any]:
        """Runs ``graph`` on the values of its inputs, and returns the values of its outputs."""
        values = self._execute(graph, inputs, None)
        return [values[node] for node in graph._outputs]

    def run_until(self, node: Node, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph up to ``node`` and returns its value.

        Raises:
            GraphError: when the arguments do not have the structure that was traced, or the graph does not
                produce ``node``.
        """
        arg_def, inputs = self.bind(args, kwargs)
        values = self._execute(self.traced.argdef_graph_map[arg_def], inputs, node)
        if node not in values:
            raise GraphError(f"the graph does not produce {node.name}: is it a node of another copy?")
        return values[node]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TreeDef, list[Any]]:
        """Returns the key of the graph for these arguments, and the values of the graph's inputs.

        Raises:
            GraphError: when the arguments do not have the structure that was traced.
        """
        try:
            if self.traced.argspec is not None:
                args, kwargs = _convert_kwargs_to_args(self.traced.argspec, args, kwargs, True)
            leaves, arg_def = tree_flatten(((self.traced, *args), kwargs))
            known = arg_def in self.traced.argdef_graph_map
        except (TypeError, AssertionError) as error:
            raise GraphError(f"the arguments do not fit the traced module: {error}") from error
        if not known:
            traced = " or ".join(_signature(d) for d in self.traced.argdef_graph_map)
            hint = "; make Tensors of numpy arrays" if any(isinstance(v, np.ndarray) for v in leaves) else ""
            raise GraphError(
                f"the module was traced as {traced}, but is called as {_signature(arg_def)}{hint}."
            )
        return arg_def, [leaf for leaf in leaves if isinstance(leaf, (Module, RawTensor))]

    def _execute(self, graph: InternalGraph, inputs: list[Any], until: Node | None) -> dict[Node, Any]:
        """Runs the exprs; returns the values that are alive at the end, by node."""
        large = large_reads(graph)
        steps = round_late(graph._exprs, large)
        frees = last_uses(graph, steps)
        values: dict[Node, Any] = {}
        for node in graph._inputs:
            values[node] = self.on_node(node, inputs.pop(0))
        if until is not None and until in values:
            return values
        for key in frees[None]:
            values.pop(key, None)
        for expr in steps:
            # Nothing else may hold a value here: a local name would keep it through the next expr.
            self._store(expr, self.run_expr(expr, [values[n] for n in expr.inputs]), values)
            if until is not None and until in values:
                return values
            for key in frees[expr]:
                values.pop(key, None)
            if expr in large:
                self._memory.note(large[expr])
        return values

    def _store(self, expr: Expr, results: Sequence[Any] | None, values: dict[Node, Any]) -> None:
        outputs = () if results is None else results
        if len(outputs) != len(expr.outputs):
            raise GraphError(
                f"%{expr._id} has the outputs {[n.name for n in expr.outputs]}, "
                f"but run_expr returned {len(outputs)} values."
            )
        for node, value in zip(expr.outputs, outputs, strict=True):
            values[node] = self.on_node(node, value)
            if self._waits and isinstance(value, RawTensor):
                self._wait(math.prod(value.shape) * value.dtype.itemsize)

    def _wait(self, given: int) -> None:
        """Waits for MegEngine when it was given ops with ``PART_BYTES`` of results."""
        self._given += given
        if self._given >= PART_BYTES:
            synchronize()
            self._given = 0


def round_late(steps: Sequence[Expr], large: Mapping[Expr, int]) -> Sequence[Expr]:
    """Moves what is computed only of large parameters before its first reader: all at once are a network.

    Args:
        steps: exprs in an order in which they can run.
        large: the exprs that read large parameters, as `large_reads` gives them.
    """
    waiting: dict[Node, Expr] = {}
    order: list[Expr] = []
    for expr in steps:
        if expr in large and _rounds(expr):
            waiting.update(dict.fromkeys(expr.outputs, expr))
            continue
        needed = dict.fromkeys(waiting[node] for node in expr.inputs if node in waiting)
        for node in (node for early in needed for node in early.outputs):
            del waiting[node]
        order += [*needed, expr]
    return [*order, *dict.fromkeys(waiting.values())] if large else steps


def _rounds(expr: Expr) -> bool:
    """Whether an expr gives floats in the shape of the parameter that it reads; what ranks stays in place."""
    stored = [node for node in expr.inputs if isinstance(node, TensorNode)]
    if len(expr.outputs) != 1 or not all(isinstance(node.expr, GetAttr) for node in expr.inputs):
        return False
    (out,) = expr.outputs
    if not isinstance(out, TensorNode) or out.dtype is None or np.dtype(out.dtype).kind != "f":
        return False
    return any(node.shape is not None and node.shape == out.shape for node in stored)


def interpret(expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
    """Computes the outputs of ``expr`` without changing its inputs.

    In-place methods (``x += y``, ``x[i] = y``) write into the Tensor that they are called on. In a graph
    their result is a node of its own, and the value of the old node must not change.

    Args:
        expr: the expr.
        inputs: the values of ``expr.inputs``.
    """
    if not isinstance(expr, CallMethod) or not isinstance(inputs[0], RawTensor):
        return expr.interpret(*inputs)
    if expr.method in IN_PLACE:
        (first, *others), kwargs = expr.unflatten_args(inputs)
        return (getattr(first, IN_PLACE[expr.method])(*others, **kwargs),)
    if expr.method == "__setitem__":
        return expr.interpret(F.copy(inputs[0]), *inputs[1:])
    return expr.interpret(*inputs)


def locate_failure(traced: TracedModule, *args: Any, **kwargs: Any) -> str:
    """Runs ``traced`` op by op; returns a sentence about the first op that fails, "" if none does.

    MegEngine reports an error of a kernel some ops later; here one op is computed at a time. Modules do not
    update their statistics.

    Args:
        traced: a traced module, flat or hierarchical.
        *args: arguments of its forward, with Tensors.
        **kwargs: keyword arguments of its forward.

    Raises:
        GraphError: when the arguments do not have the structure that was traced.
    """
    arg_def, inputs = Interpreter(traced).bind(args, kwargs)
    return locate_failure_of(traced.argdef_graph_map[arg_def], inputs)


def locate_failure_of(graph: InternalGraph, inputs: Sequence[Any]) -> str:
    """Does what `locate_failure` does for a graph and the values of its inputs, the first one its module."""
    traced = inputs[0]
    with quiet_engine(traced):
        try:
            _OneByOne(traced).run_all(graph, list(inputs))
        except _OpFailure as failure:
            return str(failure)
    return ""


class _OpFailure(Exception):
    """An op of the graph failed; the message describes it."""


class _OneByOne(Interpreter):
    """Runs a graph and the graphs of its submodules; an op that fails is a `_OpFailure`."""

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes ``expr``; a fake quant passes its input, since it may collect statistics."""
        graph = called_graph(expr)
        if graph is not None:
            return self.run_all(graph, list(inputs))
        if isinstance(owner(expr), (FakeQuant, BiasQuant)):
            return (inputs[1],)
        if updates_inputs(expr):
            inputs = [F.copy(v) if isinstance(v, RawTensor) else v for v in inputs]
        try:
            return interpret(expr, inputs)
        except ENGINE_ERRORS as error:
            raise _OpFailure(describe_failure(expr, inputs, error)) from error


def _signature(arg_def: TreeDef) -> str:
    """Writes the signature of a call with arguments of this structure; the first one is the module itself."""
    args, kwargs = arg_def.children_defs
    shown = [_structure(d) for d in args.children_defs[1:]]
    shown += [f"{key}={_structure(d)}" for key, d in zip(kwargs.aux_data, kwargs.children_defs, strict=True)]
    return f"forward({', '.join(shown)})"


def _structure(tree: TreeDef) -> str:
    if isinstance(tree, LeafDef):
        constant = tree.const_val is not None or type(None) in tree.type
        small = constant and not isinstance(tree.const_val, np.ndarray)
        return repr(tree.const_val) if small else str(tree.type[0].__name__)
    parts = [_structure(d) for d in tree.children_defs]
    if issubclass(tree.type, dict):
        return f"{{{', '.join(f'{k!r}: {v}' for k, v in zip(tree.aux_data, parts, strict=True))}}}"
    left, right = "[]" if issubclass(tree.type, list) else "()"
    return f"{left}{', '.join(parts)}{right}"


def last_uses(graph: InternalGraph, order: Sequence[Expr] | None = None) -> dict[Expr | None, list[Node]]:
    """Lists the nodes to free after each expr; under None, the inputs that nothing reads.

    Args:
        graph: the graph.
        order: all exprs of the graph in the order of computation; None for the graph's order.
    """
    steps = graph._exprs if order is None else order
    outputs = set(graph._outputs)
    last: dict[Node, Expr | None] = dict.fromkeys(graph._inputs)
    for expr in steps:
        last.update((node, expr) for node in (*expr.outputs, *expr.inputs))
    frees: dict[Expr | None, list[Node]] = {None: [], **{expr: [] for expr in steps}}
    for key, expr in last.items():
        if key not in outputs:
            frees[expr].append(key)
    return frees
