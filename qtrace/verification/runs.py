"""Runs a batch in the runtime and in the graph: the graph alone, and op by op on the runtime's integers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.data.batches import as_arguments, refuse_nan, translate_errors
from qtrace.errors import ExportError
from qtrace.graph.dataflow import needed_nodes
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Input, Node, TensorNode
from qtrace.metrics import sqnr_db
from qtrace.numerics import dequantize, quantize
from qtrace.preparation.model import QuantizedModel, QuantizedSite
from qtrace.preparation.record import graph_hash
from qtrace.scheme import QParams
from qtrace.verification.crosscheck import Disagreement, RuntimeValues
from qtrace.verification.report import VerifyReport
from qtrace.verification.runtimes.base import RuntimeRun, Session
from qtrace.verification.selections import find_selections, selects

__all__ = [
    "BatchRun",
    "EndToEnd",
    "File",
    "GraphRun",
    "OpByOp",
    "activations",
    "integer_qparams",
    "leaves",
    "output_names",
]


@dataclass
class BatchRun:
    """The values of one batch on both sides.

    Attributes:
        number: the number of the batch, from 0.
        arguments: the batch as arguments of a call.
        graph: the run of the graph alone.
        runtime: the run of the runtime.
        single: the run of the graph op by op, from the runtime's integers.
        outputs: the outputs of `single`.
    """

    number: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    graph: EndToEnd
    runtime: RuntimeRun
    single: OpByOp
    outputs: list[np.ndarray]


class File:
    """An exported file in a session of its runtime, beside the converted graph.

    Args:
        path: the file.
        model: the converted graph.
        session: the session, with the runtime's optimizations or without.

    Raises:
        ExportError: when the file is not an export of the graph.
    """

    def __init__(self, path: Path, model: QuantizedModel, session: Session) -> None:
        self.path, self.model, self.session = path, model, session
        self.names = _integer_names(model, path, session)
        self.output_names = output_names(model)
        nodes = find_selections(model.module)
        ends = zip(self.output_names, model.module.graph.outputs, strict=True)
        self.selections = {node.name: origin for node, origin in nodes.items()}
        self.selections.update((name, nodes[node]) for name, node in ends if node in nodes)

    def report(self, max_lsb: int, min_equal: float, min_sqnr_db: float) -> VerifyReport:
        """Returns an empty report with these tolerances."""
        return VerifyReport(str(self.path), max_lsb, min_equal, min_sqnr_db, selections=self.selections)

    def run(
        self, batches: Iterable[Any], op_by_op: Callable[[File, dict[str, np.ndarray]], OpByOp]
    ) -> Iterator[BatchRun]:
        """Runs each batch on both sides; the graph must be in eval mode.

        Args:
            batches: inputs as for ``qtrace.calibrate``.
            op_by_op: makes the op-by-op run of a batch from the runtime's integers.

        Raises:
            CalibrationError: when a batch does not fit the model or holds NaN.
        """
        converted = self.model.module
        for number, batch in enumerate(batches):
            args, kwargs = as_arguments(batch, converted, number)
            refuse_nan((args, kwargs), number)
            graph = EndToEnd(self)
            with translate_errors(converted, (args, kwargs), number):
                graph.compute(args, kwargs)
            runtime = self.session.run(graph.inputs)
            single = op_by_op(self, runtime.integers)
            outputs = [t.numpy() for t in leaves(single.run(*args, **kwargs))]
            selected = single.selected_outputs(self.output_names)
            single.report.add_outputs("op_by_op", self.output_names, outputs, runtime.outputs, selected)
            yield BatchRun(number, (args, kwargs), graph, runtime, single, outputs)

    def find_wrong_output(self, run: BatchRun, min_sqnr_db: float) -> Disagreement | None:
        """Finds the first output that differs by too much although both sides read the same integers.

        Args:
            run: one batch.
            min_sqnr_db: smallest signal-to-noise ratio allowed.

        Returns:
            The output's values on both sides; None where every output is within the limit or depends on a
            selection.
        """
        nodes, selected = self.model.module.graph.outputs, run.single.selected_outputs(self.output_names)
        values = zip(self.output_names, nodes, run.outputs, run.runtime.outputs, strict=True)
        for name, node, graph, runtime in values:
            if runtime is None or name in selected or graph.shape != runtime.shape:
                continue
            if sqnr_db(graph, runtime) < min_sqnr_db:
                return Disagreement(node.name, graph, runtime)
        return None


def _integer_names(converted: QuantizedModel, path: Path, session: Session) -> dict[str, str]:
    """Maps each node that holds dequantized integers to the name under which the runtime returns them.

    A format may leave out the integers of ops that only move values, and sites on which no output depends.

    Raises:
        ExportError: when the file lacks a site, or says that it was exported from another graph.
    """
    known = set(session.integer_names)
    computed = {n: s.name for n, s in activations(converted).items() if not s.static}
    needed = {node.name for node in needed_nodes(converted.module)}
    missing = sorted({site for name, site in computed.items() if name in needed} - known)
    if missing and not getattr(session, "partial", False):
        raise ExportError(f"{path} is not an export of this module: it has no integers of {missing[0]!r}.")
    exported = getattr(session, "graph_hash", "")  # of formats that store it
    if exported and exported != graph_hash(converted.module):
        other = "another calibration or" if computed else "a quantized module or one with"
        raise ExportError(
            f"{path} is not an export of this module: it comes from {other} other weights; export it again."
        )
    moved = {name: name for name in converted.annotation.moved()}
    return {name: site for name, site in {**computed, **moved}.items() if site in known}


def output_names(converted: QuantizedModel) -> list[str]:
    """Returns the names of the graph's outputs before rounding; a repeated name is numbered."""
    names = [converted.unrounded_name(node) for node in converted.module.graph.outputs]
    return [f"{n}_{c}" if (c := names[:i].count(n) + 1) > 1 else n for i, n in enumerate(names)]


def activations(converted: QuantizedModel) -> dict[str, QuantizedSite]:
    """Maps the name of each node that holds a rounded activation to its site."""
    return {name: site for name, site in converted.rounded.items() if site.sort == "activation"}


def integer_qparams(converted: QuantizedModel) -> dict[str, QParams]:
    """Maps the name of each node that holds dequantized integers to their parameters."""
    sites = activations(converted).items()
    return {**{name: site.qparams for name, site in sites}, **converted.carried_qparams()}


class OpByOp(Interpreter):
    """Compares at every site, then goes on with the runtime's integers.

    Where both sides select other rows from the same integers, a site right behind the selection cannot be
    compared, and neither can what is computed from the selection past that site. The graph goes on with the
    runtime's integers there, or with its own where their number differs.

    Attributes:
        values: the runtime's integers.
        disagreement: the first site that differs by more than the report allows; None where there is none.
    """

    def __init__(self, file: File, integers: dict[str, np.ndarray], report: VerifyReport) -> None:
        super().__init__(file.model.module)
        self.names, self.integers, self.report = file.names, integers, report
        self.qparams = integer_qparams(file.model)
        self.values = RuntimeValues(self.names, integers, self.qparams)
        self.disagreement: Disagreement | None = None
        self._selected: set[Node] = set()  # computed from a selection, up to the next site
        self._unequal: set[Node] = set()  # those of them with other rows than the runtime, and later nodes

    def on_node(self, node: Node, value: Any) -> Any:
        """Replaces the graph's value at a site by what the runtime computed there."""
        name, inputs = self.names.get(node.name), set(node.expr.inputs)
        unequal = not inputs.isdisjoint(self._unequal)
        selected = selects(node.expr) or not inputs.isdisjoint(self._selected)
        self._unequal.update([node] if unequal else [])
        self._selected.update([node] if selected and (name is None or unequal) else [])
        if name is None or unequal:
            return value
        qparams = self.qparams[node.name]
        graph, runtime = quantize(value.numpy(), qparams), self.integers[name]
        if not self.report.compares("op_by_op", f"site {node.name}", graph, runtime):
            self._unequal |= {node, *self._selected}
            return value
        if selected and np.abs(runtime.astype(np.int64) - graph).max(initial=0) > self.report.max_lsb:
            self.report.note_rows("op_by_op", f"site {node.name}", graph, runtime)
            self._unequal |= self._selected
        else:
            self.on_integers(value, Disagreement(node.name, graph, runtime, qparams))
        return type(value)(dequantize(runtime, qparams))

    def selected_outputs(self, names: list[str]) -> set[str]:
        """Returns which of the outputs, called `names`, come from a selection without a site between."""
        outputs = zip(names, self.traced.graph.outputs, strict=True)
        return {name for name, node in outputs if node in self._selected or node in self._unequal}

    def on_integers(self, value: Any, both: Disagreement) -> None:
        """Counts the integers of a site on both sides; `value` is the graph's tensor."""
        worst = self.report.add("op_by_op", both.node, both.graph, both.runtime)
        if self.disagreement is None and worst > self.report.max_lsb:
            self.disagreement = both


class GraphRun(Interpreter):
    """Runs the graph alone and keeps its inputs, its outputs and the integers of nodes.

    Args:
        model: the converted graph.
        nodes: names of nodes that hold dequantized integers.
    """

    def __init__(self, model: QuantizedModel, nodes: Collection[str]) -> None:
        super().__init__(model.module)
        self.nodes, self.qparams = nodes, integer_qparams(model)
        self.integers: dict[str, np.ndarray] = {}
        self.inputs: list[np.ndarray] = []
        self.outputs: list[np.ndarray] = []

    def on_node(self, node: Node, value: Any) -> Any:
        """Keeps the values of graph inputs and the integers of sites."""
        if isinstance(node.expr, Input) and isinstance(node, TensorNode):
            self.inputs.append(value.numpy())
        if node.name in self.nodes:
            self.integers[node.name] = quantize(value.numpy(), self.qparams[node.name])
        return value

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs the graph on the arguments of one call."""
        self.outputs = [t.numpy() for t in leaves(self.run(*args, **kwargs))]


class EndToEnd(GraphRun):
    """Runs the graph alone, to compare it with a run of the runtime."""

    def __init__(self, file: File) -> None:
        super().__init__(file.model, file.names)
        self.names = file.names

    def tally(
        self,
        run: RuntimeRun,
        mode: str,
        report: VerifyReport,
        output_names: list[str],
        exact: Sequence[np.ndarray] = (),
    ) -> None:
        """Adds the differences between the runtime's values in `run` and the graph's to `report`.

        Args:
            run: the run of the runtime.
            mode: "end_to_end" or "deployed".
            report: the report.
            output_names: the names of the outputs.
            exact: the outputs of the float network, if both sides are compared to them.
        """
        for node, integers in self.integers.items():
            report.add(mode, node, integers, run.integers[self.names[node]])
        name = "reference" if mode == "end_to_end" else mode
        report.add_outputs(name, output_names, self.outputs, run.outputs, report.selections)
        if exact:
            report.add_closeness(name, output_names, exact, self.outputs, run.outputs)


def leaves(value: Any) -> list[Any]:
    """Returns the tensors in the result of a graph, in the order of the graph's outputs."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]
