"""Renews the shapes and dtypes that nodes record, and finds those that are not true any more.

A recorded shape is true where its op gives this shape for the shapes that its inputs record. The editor
renews the nodes after an edit when it commits. A change of a layer's attribute, such as its stride, passes
no editor: `prepare` and the exporters renew the whole graph, and `lint` reports the node.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megengine.functional as F
import numpy as np
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr
from megengine.traced_module.node import Node, TensorNode
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError
from qtrace.graph.failures import describe_failure
from qtrace.graph.inference import OpError, TensorType, TypeInference, recorded_type
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.tracing import example_inputs
from qtrace.graph.walk import called_graph, updates_inputs
from qtrace.process import on_engine_thread


@on_engine_thread
def renew_all(traced: TracedModule) -> None:
    """Renews shape and dtype of every node of ``traced`` from those that its graph's inputs record.

    A shape that depends on values stays as it is recorded, unless an op before it gives another shape now:
    then it becomes None ("unknown").

    Args:
        traced: a traced module, flat or hierarchical; its nodes are changed in place.

    Raises:
        GraphError: when an op cannot run on the shapes of its inputs; no node changes then.
    """
    for graph in traced.argdef_graph_map.values():
        run = _Renewal(traced)
        run.run_top(graph)
        for node, kind in run.new.items():
            write_type(node, kind)


class _Renewal(TypeInference):
    """Infers the types of all nodes of a graph and of the graphs that it calls, each at its first call."""

    def __init__(self, traced: TracedModule) -> None:
        super().__init__(traced)
        self.new: dict[TensorNode, TensorType | None] = {}

    def run_top(self, graph: InternalGraph) -> None:
        """Infers the types of all nodes of ``graph`` from those that its inputs record."""
        self.run_graph(graph, [self.traced, *(recorded_type(node) for node in graph._inputs[1:])])

    def run_graph(self, graph: InternalGraph, inputs: list[Any]) -> list[Any]:
        """Infers the types of all nodes of ``graph``; returns the values of its outputs."""
        values: dict[Node, Any] = dict(zip(graph._inputs, inputs, strict=True))
        changed: set[Node] = set()
        for node in graph._inputs:
            self._keep(node, values[node], changed)
        for expr in graph._exprs:
            results = self.results(expr, [values[n] for n in expr.inputs])
            stale = any(n in changed for n in expr.inputs)
            for node, result in zip(expr.outputs, results, strict=True):
                if result is None and not stale:
                    result = recorded_type(node)
                values[node] = result
                self._keep(node, result, changed)
        return [values[node] for node in graph._outputs]

    def _keep(self, node: Node, value: Any, changed: set[Node]) -> None:
        if isinstance(node, TensorNode):
            kind = type_of_value(value)
            if not same_type(kind, recorded_type(node)):
                changed.add(node)
            self.new.setdefault(node, kind)


def renew_behind(traced: TracedModule, edited: Container[Expr], rewired: Mapping[Expr, Any]) -> None:
    """Renews the nodes of a flat graph after its edited exprs, as far as their types change.

    Args:
        traced: a flat traced module, whose edits are written.
        edited: the exprs that are new or have other arguments.
        rewired: the exprs that read another node than before -> pairs of the node and the old node's type.

    Raises:
        GraphError: when an op cannot run on the types of its inputs.
    """
    inference = TypeInference(traced)
    changed: set[Node] = set()
    for expr in traced.graph._exprs:
        stale = expr in edited or any(node in changed for node in expr.inputs)
        if not stale and any(not same_type(recorded_type(n), old) for n, old in rewired.get(expr, ())):
            stale = True
        if not stale:
            continue
        results = inference.results(expr, [inference.value(node) for node in expr.inputs])
        for node, result in zip(expr.outputs, results, strict=True):
            if not isinstance(node, TensorNode):
                continue
            if result is None and expr in edited and not any(n in changed for n in expr.inputs):
                result = recorded_type(node)  # as the edit says
            kind = type_of_value(result)
            # The values of sizes may change where their number does not.
            if not same_type(kind, recorded_type(node)) or isinstance(result, RawTensor):
                changed.add(node)
            write_type(node, kind)
            inference.values[node] = result


@dataclass(frozen=True)
class InlinedCall:
    """A call of a submodule, written into a flat graph with the shapes of another call.

    Attributes:
        start: position of the call's first expr in the flat graph.
        stop: position after the call's last expr.
        outputs: the call's results in the flat graph.
        recorded: the call's results in the caller's graph, which have the right shapes.
    """

    start: int
    stop: int
    outputs: Sequence[Node]
    recorded: Sequence[Node]


def renew_calls(traced: TracedModule, calls: Sequence[InlinedCall]) -> None:
    """Gives the tensors of ``calls`` the shapes and dtypes of their own call, in time linear in their exprs.

    A traced submodule has one graph however often it is called, and its nodes record the shapes of the first
    call. A shape that depends on values, or an op that cannot run, becomes None ("unknown"). Exporters refuse
    such a node, while a shape of another call would give a wrong file.

    Args:
        traced: a flat traced module; its modules do not change.
        calls: calls of submodules in the order of the graph, none inside of another.
    """
    if not calls:
        return
    inference = TypeInference(traced)
    with quiet_engine(traced):
        for call in calls:
            for expr in traced.graph._exprs[call.start : call.stop]:
                try:
                    results = inference.results(expr, [inference.value(node) for node in expr.inputs])
                except OpError:
                    results = [None] * len(expr.outputs)
                for node, result in zip(expr.outputs, results, strict=True):
                    inference.values[node] = result
                    if isinstance(node, TensorNode):
                        write_type(node, type_of_value(result))
            for node, recorded in zip(call.outputs, call.recorded, strict=True):
                if isinstance(node, TensorNode) and isinstance(recorded, TensorNode):
                    node._shape, node._dtype = recorded._shape, recorded._dtype
                    inference.values.pop(node, None)


def find_false_types(module: TracedModule, graph: InternalGraph) -> Iterator[tuple[Expr, str]]:
    """Yields the exprs of ``graph`` whose recorded result is not what they give, with a clause about each.

    Every expr is taken with the recorded types of its inputs, so that one change is one problem.
    """
    inference = _RecordedCalls(module)
    inference.values[graph._inputs[0]] = module
    for expr in graph._exprs:
        try:
            results = inference.results(expr, [inference.value(node) for node in expr.inputs])
        except OpError as error:
            yield expr, f"cannot run: {error}"
            results = [None] * len(expr.outputs)
        for node, result in zip(expr.outputs, results, strict=True):
            kind, recorded = type_of_value(result), recorded_type(node)
            if kind is not None and recorded is not None and not same_type(kind, recorded):
                yield expr, f"records {_show(recorded)}, but its op gives {_show(kind)}"
                result = recorded
            inference.values[node] = recorded if result is None else result


class _RecordedCalls(TypeInference):
    """Takes the result of a submodule that is called with the types of its graph's inputs from its graph."""

    def call(self, expr: Expr, inputs: Any) -> Any:
        """Returns the values of the results of ``expr``; see `TypeInference.call`."""
        graph = called_graph(expr)
        if graph is not None:
            kinds = [type_of_value(value) for value in inputs[1:]]
            recorded = [recorded_type(node) for node in graph._inputs[1:]]
            if all(same_type(a, b) for a, b in zip(kinds, recorded, strict=True)):
                return [recorded_type(node) for node in graph._outputs], None
        return super().call(expr, inputs)


def type_of_value(value: Any) -> TensorType | None:
    """Returns the type of a value that `TypeInference` gives; None for a module and an unknown value."""
    if isinstance(value, RawTensor):
        return TensorType(tuple(int(n) for n in value.shape), value.dtype)
    return value if isinstance(value, TensorType) else None


def same_type(a: TensorType | None, b: TensorType | None) -> bool:
    """Returns whether two types are the same; quantized dtypes count by what stores them."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and np.dtype(a.dtype) == np.dtype(b.dtype)


def write_type(node: TensorNode, kind: TensorType | None) -> None:
    """Records ``kind`` at ``node``; None records an unknown shape."""
    if kind is None:
        node._shape = None
    else:
        node._shape, node._dtype = kind.shape, kind.dtype


def _show(kind: TensorType) -> str:
    return f"{kind.shape} {np.dtype(kind.dtype).name}"


# Renews the shapes and dtypes that the nodes of a traced module record, for its inputs or other ones.

_ADVICE = "give inputs of sizes that the graph takes"


@on_engine_thread
def propagate_shapes(traced: TracedModule, *inputs: Any) -> None:
    """Renews shape and dtype of every node of ``traced``.

    With example inputs, the graph runs once on them, in eval mode: parameters, running statistics and
    training flags stay as they are. Without, the shapes are inferred from those that the graph's inputs
    record, and no layer is computed: after a change of a layer, such as ``traced.conv.stride = 2``. A shape
    that depends on values becomes None ("unknown") if an op before it gives another shape now.

    If an op fails, no node changes. A submodule that is called several times has one graph, whose nodes
    record the shapes of its first call.

    Args:
        traced: a traced module, flat or hierarchical; its nodes are changed in place.
        *inputs: inputs of ``forward`` by position: Tensors, numpy arrays, dicts, lists and tuples of them;
            none to infer from the recorded shapes.

    Raises:
        GraphError: when the inputs do not have the traced structure, or an op fails on them; the message
            names its node, its source line and the shapes of its inputs.
        TraceError: when an input is of a type that no traced module takes.
    """
    if not inputs and isinstance(traced, TracedModule):
        renew_all(traced)
        return
    run = _ShapeRun(traced)
    # Copies: the graph may return or write into its inputs.
    args, _ = example_inputs.fresh((example_inputs.to_tensors(inputs), {}))
    with quiet_engine(traced):
        run.run(*args)
    for node, (shape, dtype) in run.recorded.items():
        node._shape, node._dtype = shape, dtype


@on_engine_thread
def set_input_shapes(traced: TracedModule, shapes: Mapping[str, Sequence[int]]) -> None:
    """Changes the shapes of inputs of ``traced``, and infers the shapes of all other nodes.

    Args:
        traced: a traced module with one graph, flat or hierarchical; its nodes are changed in place.
        shapes: name of an input node -> its new shape; the other inputs keep theirs.

    Raises:
        GraphError: when there is no such input, or an op cannot run on the new shapes; no node changes then.
    """
    nodes = {str(node.name): node for node in traced.graph.inputs if isinstance(node, TensorNode)}
    for name in shapes:
        if name not in nodes:
            raise GraphError(f"the graph lacks input {name!r}; it has {', '.join(nodes)}.")
    before = {node: node._shape for node in nodes.values()}
    try:
        for name, shape in shapes.items():
            nodes[name]._shape = tuple(int(n) for n in shape)
        renew_all(traced)
    except GraphError:
        for node, old in before.items():
            node._shape = old
        raise


class _ShapeRun(Interpreter):
    """Runs a graph and the graphs of its submodules; records shape and dtype of every tensor node."""

    def __init__(self, traced: TracedModule) -> None:
        super().__init__(traced)
        self.recorded: dict[TensorNode, tuple[tuple[int, ...], Any]] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        """Records the shape and dtype of ``value`` at the first call that gives ``node`` a value."""
        if isinstance(node, TensorNode) and node not in self.recorded:
            self.recorded[node] = tuple(int(n) for n in value.shape), value.dtype
        return value

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes ``expr``; a call of a traced submodule runs the submodule's graph."""
        graph = called_graph(expr)
        if graph is not None:
            return self.run_all(graph, list(inputs))
        if updates_inputs(expr):
            inputs = [F.copy(v) if isinstance(v, RawTensor) else v for v in inputs]
        try:
            return super().run_expr(expr, inputs)
        except Exception as error:  # MegEngine's errors are of no class of their own
            raise GraphError(describe_failure(expr, inputs, error, _ADVICE)) from error
