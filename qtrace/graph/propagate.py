"""Renews the shapes and dtypes that the nodes of a traced module record, for its inputs or other ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import megengine.functional as F
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr
from megengine.traced_module.node import Node, TensorNode

from qtrace.errors import GraphError
from qtrace.graph.failures import describe_failure
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.renewal import renew_all
from qtrace.graph.tracing import example_inputs
from qtrace.graph.walk import called_graph, updates_inputs
from qtrace.process import on_engine_thread

__all__ = ["propagate_shapes", "set_input_shapes"]

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
