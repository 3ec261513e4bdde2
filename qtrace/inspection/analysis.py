"""What each op of a graph costs: multiply-accumulates, parameters, memory and time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.module import Module

from qtrace import ops, process
from qtrace.display import Displayed, format_table
from qtrace.graph.interface import list_inputs
from qtrace.graph.interpreter import Interpreter, last_uses
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.open_axes import Shape, describe_sizes, open_shapes, show_shape
from qtrace.graph.types import Constant, Expr, GetAttr, ModuleNode, Node, TensorNode, TracedModule
from qtrace.graph.walk import check_traced, exprs, get_module, module_path, op_label
from qtrace.ops.base import count_macs, is_uncounted
from qtrace.plugins.options import check_arguments
from qtrace.preparation.model import is_quantized
from qtrace.preparation.normalize import normalize
from qtrace.preparation.passes.insert import headline
from qtrace.process import on_engine_thread


@dataclass(frozen=True)
class OpCost:
    """The cost of one op at the recorded shapes.

    Attributes:
        name: the name of its first output.
        op: its callee as source code has it.
        kind: its kind, as configs name it; "" for an op without a rule.
        module: the path of its module.
        shape: the recorded shape of its first output; None if the graph records none. Names of open axes
            stand in the place of their sizes, and -1 for sizes that depend on them.
        macs: multiply-accumulates.
        parameters: values of the parameters and buffers that it is the first to read.
        output_bytes: bytes of its outputs.
        live_bytes: bytes of all values that exist while it runs: its inputs, its outputs, and what a later op
            reads.
        seconds: the median time of a run; None if no time was measured.
    """

    name: str
    op: str
    kind: str
    module: str
    shape: Shape | None
    macs: int
    parameters: int
    output_bytes: int
    live_bytes: int
    seconds: float | None = None


@dataclass(frozen=True, repr=False)
class Analysis(Displayed):
    """The costs of the ops of a graph, in the order of computation.

    Attributes:
        ops: one cost for each op.
        uncounted: names of ops that multiply and accumulate, but whose ``macs`` are not known.
        sizes: which axes of the inputs are open, in words.
    """

    ops: tuple[OpCost, ...]
    uncounted: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()

    @property
    def macs(self) -> int:
        """The multiply-accumulates of all ops."""
        return sum(op.macs for op in self.ops)

    @property
    def parameters(self) -> int:
        """The values of all parameters and buffers that the graph reads."""
        return sum(op.parameters for op in self.ops)

    @property
    def peak(self) -> OpCost | None:
        """The op at which most bytes of activations exist at once; None for a graph without ops."""
        return max(self.ops, key=lambda op: op.live_bytes, default=None)

    @property
    def seconds(self) -> float | None:
        """The sum of the times of the ops; None if no time was measured."""
        times = [op.seconds for op in self.ops if op.seconds is not None]
        return sum(times) if times else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the analysis as plain data."""
        peak = self.peak
        totals = {
            "macs": self.macs,
            "parameters": self.parameters,
            "peak_activation_bytes": 0 if peak is None else peak.live_bytes,
            "peak_at": None if peak is None else peak.name,
            "seconds": self.seconds,
        }
        return {
            "totals": totals,
            "uncounted": list(self.uncounted),
            "sizes": list(self.sizes),
            "ops": [asdict(op) for op in self.ops],
        }

    def table(self, max_width: int | None = 160) -> str:
        """Formats one row for each op, and the totals below.

        Args:
            max_width: largest width in characters; None for no limit.
        """
        timed = self.seconds is not None
        headers = ("name", "op", "module", "shape", "MACs", "share", "parameters", "output KiB", "live KiB")
        rows = [self._row(op, timed) for op in self.ops]
        lines = [format_table((*headers, "ms") if timed else headers, rows, max_width), ""]
        lines.append(f"MACs: {self.macs:,}; parameters: {self.parameters:,}")
        if self.peak is not None:
            lines.append(
                f"activation memory: {self.peak.live_bytes / 1024:,.1f} KiB at most, at {self.peak.name}"
            )
        if self.seconds is not None:
            lines.append(f"time of the ops: {1e3 * self.seconds:.3f} ms")
        if self.uncounted:
            lines.append(f"MACs not counted: {', '.join(self.uncounted)}")
        lines += [f"sizes: {line}" for line in self.sizes]
        return "\n".join(lines)

    def _row(self, op: OpCost, timed: bool) -> tuple[str, ...]:
        share = f"{100 * op.macs / self.macs:.1f} %" if op.macs else ""
        shape = "?" if op.shape is None else show_shape(op.shape)
        sizes = (f"{op.output_bytes / 1024:,.1f}", f"{op.live_bytes / 1024:,.1f}")
        counts = (f"{op.macs:,}" if op.macs else "", share, f"{op.parameters:,}" if op.parameters else "")
        row = (op.name, op.op, op.module, shape, *counts, *sizes)
        return (*row, "" if op.seconds is None else f"{1e3 * op.seconds:.3f}") if timed else row


@check_arguments
@on_engine_thread
def analyze(model: TracedModule, runs: int = 0) -> Analysis:
    """Counts what each op of ``model`` costs at the recorded shapes, in time linear in the graph.

    Layers are counted as functions of their weights, as `prepare` writes them. Every result has memory of its
    own here, also where MegEngine gives a view; parameters are not part of the activation memory.

    Args:
        model: a traced module: float, prepared or converted; it is not changed.
        runs: how often to run it in MegEngine, op by op on random inputs, for the times; 0 measures none.

    Raises:
        GraphError: when ``model`` is not a traced module.
    """
    check_traced(model, "inspect takes")
    flat = normalize(model)
    order = [e for e in exprs(flat) if not isinstance(e, (GetAttr, Constant)) and e.outputs]
    calls = {e: ops.read(e) for e in order}
    live = _live_bytes(flat)
    parameters = _first_reads(flat, order)
    times = _measure(flat, runs) if runs else {}
    opened = open_shapes(flat)
    costs = []
    for expr in order:
        call, out = calls[expr], expr.outputs[0]
        costs.append(
            OpCost(
                name=str(out.name),
                op=op_label(expr),
                kind="" if call is None else call.kind,
                module=module_path(expr),
                shape=opened.get(str(out.name), _recorded_shape(out)),
                macs=0 if call is None else count_macs(call),
                parameters=parameters[expr],
                output_bytes=sum(_bytes(n) for n in expr.outputs),
                live_bytes=live[expr],
                seconds=times.get(expr),
            )
        )
    uncounted = (c.out.name for c in calls.values() if c is not None and is_uncounted(c))
    return Analysis(tuple(costs), tuple(map(str, uncounted)), tuple(describe_sizes(flat)))


def _recorded_shape(node: Node) -> tuple[int, ...] | None:
    shape = getattr(node, "shape", None)
    return None if shape is None else tuple(int(n) for n in shape)


def _bytes(node: Node) -> int:
    """Returns the size of a value; 0 for a module, and where the graph records no shape."""
    if not isinstance(node, TensorNode) or node.shape is None or node.dtype is None:
        return 0
    return math.prod(int(n) for n in node.shape) * np.dtype(node.dtype).itemsize


def _live_bytes(flat: TracedModule) -> dict[Expr, int]:
    """Returns the bytes of the activations that exist while each expr runs."""
    frees = last_uses(flat.graph)
    stored = {n for e in exprs(flat) if isinstance(e, (GetAttr, Constant)) for n in e.outputs}
    live = sum(_bytes(n) for n in flat.graph.inputs)
    result: dict[Expr, int] = {}
    for expr in exprs(flat):
        live += sum(_bytes(n) for n in expr.outputs if n not in stored)
        result[expr] = live
        live -= sum(_bytes(n) for n in frees[expr] if n not in stored)
    return result


def _first_reads(flat: TracedModule, order: Sequence[Expr]) -> dict[Expr, int]:
    """Returns the number of stored values that each expr is the first to read."""
    seen: set[int] = set()
    result = dict.fromkeys(order, 0)
    for expr in order:
        for node in expr.inputs:
            if isinstance(node.expr, GetAttr):
                value = get_module(flat, node.expr.name)
                tensors = list(value.tensors()) if isinstance(value, Module) else [value]
            else:
                tensors = [node.expr.value] if isinstance(node.expr, Constant) else []
            for tensor in tensors:
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    result[expr] += math.prod(int(n) for n in tensor.shape)
    return result


class _Timer(Interpreter):
    """Runs a graph and measures the time of each expr."""

    def __init__(self, traced: TracedModule) -> None:
        super().__init__(traced)
        self.times: dict[Expr, list[float]] = {}

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes ``expr`` and waits for its kernel."""
        start = time.perf_counter()
        result = super().run_expr(expr, inputs)
        process.synchronize()
        self.times.setdefault(expr, []).append(time.perf_counter() - start)
        return result

    def run_once(self) -> None:
        """Runs the graph on random inputs of the recorded shapes."""
        graph = self.traced.graph
        self._execute(graph, [self._input(node) for node in graph.inputs], None)

    def _input(self, node: Node) -> Any:
        if isinstance(node, ModuleNode):
            return self.traced
        shape, dtype = tuple(int(n) for n in node.shape), np.dtype(node.dtype)
        values = np.random.default_rng(0).standard_normal(shape) if dtype.kind == "f" else np.zeros(shape)
        return Tensor(values.astype(dtype))


def _measure(flat: TracedModule, runs: int) -> dict[Expr, float]:
    """Returns the median time of each expr in ``runs`` runs, after one that is not counted."""
    timer = _Timer(flat)
    with quiet_engine(flat):
        timer.run_once()
        timer.times.clear()
        for _ in range(runs):
            timer.run_once()
    return {expr: statistics.median(times) for expr, times in timer.times.items()}


_WHOLE = "print(model) shows it whole"


def describe_graph(model: TracedModule) -> str:
    """Returns the stage of ``model``, its number of exprs and sites, its inputs and outputs, a line each."""
    inputs = ", ".join(f"{name} {tuple(shape)}" for name, shape in list_inputs(model))
    outputs = ", ".join(str(node._name) for node in model.graph._outputs)
    lines = [
        f"TracedModule {model.graph._qualname} of {len(exprs(model))} exprs",
        f"  inputs: {inputs}",
        f"  outputs: {outputs}",
    ]
    if not is_quantized(model):
        return "\n".join(
            [*lines, "  in float: qtrace.prepare(model) quantizes it; print(model) shows it whole"]
        )
    lines.append(f"  {headline(model)}")
    return "\n".join(
        [*lines, "  qtrace.explain(model) says what became of each op; print(model) shows it whole"]
    )
