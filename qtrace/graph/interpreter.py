"""Runs a traced graph expr by expr, with a hook at every node; names the op of an error; reads its dataflow.

A file has MegEngine's own class in its place, so that ``megengine.load`` reads it without qtrace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import megengine.functional as F
import numpy as np
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.core._imperative_rt.core2 import is_tracing_module
from megengine.jit.tracing import is_tracing
from megengine.module import Module
from megengine.traced_module.pytree import LeafDef, TreeDef, tree_flatten
from megengine.traced_module.traced_module import ExprFilter, ExprFilterCallFunction, InternalGraph
from megengine.traced_module.utils import _convert_kwargs_to_args

from qtrace.errors import GraphError
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.gradients import plain
from qtrace.graph.failures import describe_failure
from qtrace.graph.kernels import PART_BYTES, large_reads, quiet_engine
from qtrace.graph.types import (
    CallFunction,
    CallMethod,
    Expr,
    GetAttr,
    ModuleNode,
    Node,
    TensorNode,
    TracedModule,
)
from qtrace.graph.walk import (
    IN_PLACE,
    called_graph,
    check_traced,
    exprs,
    owner,
    reads_shape,
    tensor_inputs,
    updates_inputs,
)
from qtrace.process import LargeFrees, synchronize

# An interpreter to subclass: runs a traced graph expr by expr, with a hook at every node.

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
        check_traced(traced, "an Interpreter runs")
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


# MegEngine's graph as its documents describe it: errors name the op, lookups find what was traced.


class LocatedGraph(InternalGraph):
    """MegEngine's graph, whose errors have the node of the op that failed and its source line.

    A lookup of ``F.conv2d`` finds the convolutions of a prepared graph, which have gradients of qtrace's.
    """

    def exprs(self, recursive: bool = True) -> ExprFilter:
        """Returns the exprs, to be filtered; also the exprs of submodules, unless ``recursive`` is False."""
        return _Exprs(super().exprs(recursive))

    def interpret(self, *inputs: Any) -> Any:
        """Runs the graph on the module and the tensors that ``inputs`` holds."""
        try:
            return super().interpret(*inputs)
        except ENGINE_ERRORS as error:
            if isinstance(inputs[0], TracedModule) and not (is_tracing_module() or is_tracing()):
                problem = locate_failure_of(self, inputs)
                if problem:
                    error.args = (problem,)
            raise

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that pickle writes: MegEngine's own."""
        return InternalGraph

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the graph as one of MegEngine's own class."""
        function, arguments, *rest = super().__reduce_ex__(protocol)
        return function, tuple(InternalGraph if a is LocatedGraph else a for a in arguments), *rest

    def __deepcopy__(self, memo: dict[int, Any]) -> InternalGraph:
        """Copies the graph; the copy names failures, too."""
        result = super().__deepcopy__(memo)
        _locate(result)
        return result


class _Exprs(ExprFilter):
    def call_function(self, func: Callable[..., Any] | None) -> ExprFilterCallFunction:
        return _Calls(self, func)


class _Calls(ExprFilterCallFunction):
    def __iter__(self) -> Iterator[Expr]:
        wanted = None if self.func is None else plain(self.func)
        calls = ExprFilterCallFunction(self._iter)
        return (call for call in calls if wanted is None or plain(call.func) == wanted)


def _locate(graph: InternalGraph) -> None:
    if type(graph) is InternalGraph:
        graph.__class__ = LocatedGraph


def name_failures(traced: TracedModule) -> None:
    """Makes errors of a direct call of ``traced`` name the op that fails; the graph stays the same object."""
    for graph in traced.argdef_graph_map.values():
        _locate(graph)


# Dataflow of a flat graph: the nodes that depend on its inputs, and the nodes that its outputs need.

_LIKE = (F.zeros_like, F.ones_like, F.full_like)


def static_nodes(traced: TracedModule) -> set[Node]:
    """Finds the tensor nodes that do not depend on the values of the graph's inputs.

    They depend on parameters, constants and shapes only: ``reshape(self.table)``, or the positions of anchors
    that ``arange`` computes from ``x.shape``. Reading the shape of a tensor is not reading its values.

    Args:
        traced: a flat traced module.
    """
    static: set[Node] = set()
    for expr in exprs(traced):
        if all(n in static for n in _values_read(expr)):
            static.update(n for n in expr.outputs if isinstance(n, TensorNode))
    return static


def fixed_nodes(traced: TracedModule, without: Callable[[Expr], bool] = lambda expr: False) -> set[Node]:
    """Finds the nodes that are computed only from parameters and constants, and these themselves.

    Their values are known without a batch, unlike values of `static_nodes` that depend on an input's shape.

    Args:
        traced: a flat traced module.
        without: returns whether to exclude the outputs of an expr.
    """
    fixed = {n for n in traced.graph.inputs if isinstance(n, ModuleNode)}
    for expr in exprs(traced):
        if all(n in fixed for n in expr.inputs) and not without(expr):
            fixed.update(n for n in expr.outputs)
    return fixed


def needed_nodes(traced: TracedModule, shapes: bool = False, of: Iterable[Node] | None = None) -> set[Node]:
    """Returns the nodes on whose values an output of the graph depends, the outputs included.

    Args:
        traced: a flat traced module.
        shapes: whether to include the nodes of which an output reads only the shapes.
        of: the nodes that take the place of the outputs; None for the outputs.
    """
    needed: set[Node] = set(traced.graph.outputs if of is None else of)
    for expr in reversed(exprs(traced)):
        if any(n in needed for n in expr.outputs):
            needed.update(tensor_inputs(expr) if shapes else _values_read(expr))
    return needed


def evaluate_fixed(traced: TracedModule, nodes: Iterable[TensorNode]) -> dict[Node, Any]:
    """Computes nodes that depend only on parameters and constants.

    Args:
        traced: a flat traced module.
        nodes: nodes of its graph that are in `fixed_nodes`.

    Returns:
        node -> its Tensor.
    """
    targets = set(nodes)
    needed, order = set(targets), []
    for expr in reversed(exprs(traced)):
        if any(n in needed for n in expr.outputs):
            needed.update(n for n in expr.inputs)
            order.append(expr)
    values: dict[Node, Any] = {n: traced for n in traced.graph.inputs if isinstance(n, ModuleNode)}
    for expr in reversed(order):
        results = interpret(expr, [values[n] for n in expr.inputs])
        values.update((n, v) for n, v in zip(expr.outputs, results or (), strict=True))
    return {node: values[node] for node in targets}


def _values_read(expr: Expr) -> list[TensorNode]:
    """Returns the tensor nodes whose values, not only shapes, ``expr`` reads."""
    if reads_shape(expr):
        return []
    nodes = tensor_inputs(expr)
    if isinstance(expr, CallFunction) and expr.func in _LIKE:
        return [n for n in nodes if n is not expr.args[0]]
    return nodes
