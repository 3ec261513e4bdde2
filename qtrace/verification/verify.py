"""verify: runs an exported file in its real runtime and compares its integers with the graph's.

Two comparisons. *Op by op*: the graph computes every site from the integers that the runtime had for the
sites before it, so an error is seen at the op that makes it. *End to end*: both run from the same input.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.data.batches import as_arguments, evaluating, refuse_nan, told
from qtrace.errors import CalibrationError, ExportError
from qtrace.graph.dataflow import needed_nodes
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Input, Node, TensorNode, TracedModule
from qtrace.numerics import dequantize, quantize
from qtrace.preparation.model import QuantizedModel, QuantizedSite
from qtrace.preparation.record import graph_hash
from qtrace.process.thread import on_engine_thread
from qtrace.scheme import QParams
from qtrace.verification.crosscheck import Disagreement, RuntimeValues, cross_check
from qtrace.verification.report import VerifyReport, output_sqnr_db
from qtrace.verification.runtimes import get as get_runtime
from qtrace.verification.runtimes.base import Session

__all__ = ["EndToEnd", "OpByOp", "integer_names", "leaves", "output_names", "verify", "wrong_output"]


@on_engine_thread
def verify(
    path: str | os.PathLike[str],
    converted: TracedModule,
    batches: Iterable[Any],
    *,
    runtime: str | None = None,
    optimized: bool = True,
    max_lsb: int = 1,
    min_equal: float = 0.999,
    min_sqnr_db: float = 35.0,
) -> VerifyReport:
    """Runs ``path`` in its runtime beside ``converted`` and compares integer by integer.

    Args:
        path: a file written by ``qtrace.export`` from ``converted``.
        converted: the converted module.
        batches: inputs as for ``qtrace.calibrate``.
        runtime: the name of the runtime; None for the one that the file is meant for.
        optimized: whether to also run the file with all graph optimizations, as it will be deployed.
        max_lsb: largest difference allowed at any site, op by op.
        min_equal: smallest share of equal values allowed over all sites, op by op.
        min_sqnr_db: smallest signal-to-noise ratio allowed at the outputs: at all of them together, end to
            end, and at each one computed from the runtime's own integers.

    Returns:
        A report; its ``passed`` says whether the tolerances hold.

    Raises:
        ExportError: when the file cannot be run or is not an export of ``converted``.
        CalibrationError: when there are no batches, or one does not fit the model or holds NaN.
    """
    model = QuantizedModel(converted, "converted")
    chosen = get_runtime(Path(path), runtime)
    session = chosen.open(Path(path), False)
    fused = chosen.open(Path(path), True) if optimized else None
    report = VerifyReport(str(path), max_lsb, min_equal, min_sqnr_db)
    if optimized and chosen.kernels is not None:
        report.kernels = chosen.kernels(Path(path))
    table = integer_names(model, Path(path), session)
    ends = output_names(model)
    count = 0
    with evaluating(converted):
        for count, batch in enumerate(batches, 1):
            args, kwargs = as_arguments(batch, converted, count - 1)
            refuse_nan((args, kwargs), count - 1)
            graph = EndToEnd(model, table, report)
            with told(converted, (args, kwargs), count - 1):
                graph.compute(args, kwargs)
            ran = session.run(graph.inputs)
            single = OpByOp(model, table, ran.integers, report)
            tails = [t.numpy() for t in leaves(single.run(*args, **kwargs))]
            report.add_outputs("op_by_op", ends, tails, ran.outputs)
            if report.cross_check is None:
                _, found = wrong_output(converted, tails, ran.outputs, min_sqnr_db) or (0, None)
                found = single.disagreement or found
                if found is not None:
                    check = cross_check(converted, (args, kwargs), single.values, found)
                    report.cross_check = (found.node, check)
            graph.tally(ran.integers, "end_to_end")
            report.add_outputs("reference", ends, graph.outputs, ran.outputs)
            if fused is not None:
                deployed = fused.run(graph.inputs)
                graph.tally(deployed.integers, "deployed")
                report.add_outputs("deployed", ends, graph.outputs, deployed.outputs)
    if count == 0:
        raise CalibrationError("verification data has no batches: give at least one.")
    return report


def wrong_output(
    converted: TracedModule, graph: list[np.ndarray], runtime: list[np.ndarray], min_sqnr_db: float
) -> tuple[int, Disagreement] | None:
    """The first output that differs by more than is allowed although both sides read the same integers.

    Args:
        converted: the converted module.
        graph: its outputs, computed from the runtime's own integers.
        runtime: the runtime's outputs.
        min_sqnr_db: smallest signal-to-noise ratio allowed.

    Returns:
        The number of the output and its values; None where every output is within the limit.
    """
    for number, (node, mine, theirs) in enumerate(zip(converted.graph.outputs, graph, runtime, strict=True)):
        if output_sqnr_db(mine, theirs) < min_sqnr_db:
            return number, Disagreement(node.name, mine, theirs)
    return None


def integer_names(converted: QuantizedModel, path: Path, session: Session) -> dict[str, str]:
    """Node that holds dequantized integers -> the name under which the runtime gives them.

    A format may leave out the integers of ops that only move values, and sites on which no output depends.

    Raises:
        ExportError: when the file lacks a site, or says that it was exported from another graph.
    """
    known = set(session.integer_names)
    computed = {n: s.name for n, s in _activations(converted).items() if not s.static}
    needed = {node.name for node in needed_nodes(converted.module)}
    missing = sorted({site for name, site in computed.items() if name in needed} - known)
    if missing:
        raise ExportError(f"{path} is not an export of this module: it has no integers of {missing[0]!r}.")
    theirs = getattr(session, "graph_hash", "")  # of formats that keep it
    if theirs and theirs != graph_hash(converted.module):
        raise ExportError(
            f"{path} is not an export of this module: it comes from another calibration or other weights; "
            "export it again."
        )
    moved = {name: name for name in converted.annotation.moved()}
    return {name: site for name, site in {**computed, **moved}.items() if site in known}


def output_names(converted: QuantizedModel) -> list[str]:
    """The names of the graph's outputs, without the rounding behind them; one given twice is numbered."""
    names = [converted.unrounded_name(node) for node in converted.module.graph.outputs]
    return [f"{n}_{c}" if (c := names[:i].count(n) + 1) > 1 else n for i, n in enumerate(names)]


def _activations(converted: QuantizedModel) -> dict[str, QuantizedSite]:
    """Name of a node that holds a rounded activation -> the site of the activation."""
    return {name: site for name, site in converted.rounded.items() if site.sort == "activation"}


def _integer_qparams(converted: QuantizedModel) -> dict[str, QParams]:
    """Name of a node that holds dequantized integers -> their parameters."""
    sites = _activations(converted).items()
    return {**{name: site.qparams for name, site in sites}, **converted.carried_qparams()}


class OpByOp(Interpreter):
    """Compares at every site, then goes on with the runtime's integers.

    Attributes:
        values: what the runtime gave.
        disagreement: the first site that differs by more than the report allows; None where there is none.
    """

    def __init__(
        self,
        converted: QuantizedModel,
        names: dict[str, str],
        integers: dict[str, np.ndarray],
        report: VerifyReport,
    ) -> None:
        super().__init__(converted.module)
        self.names, self.integers, self.report = names, integers, report
        self.qparams = _integer_qparams(converted)
        self.values = RuntimeValues(names, integers, self.qparams)
        self.disagreement: Disagreement | None = None

    def on_node(self, node: Node, value: Any) -> Any:
        """Replaces the graph's value at a site by what the runtime computed there."""
        name = self.names.get(node.name)
        if name is None:
            return value
        qparams = self.qparams[node.name]
        mine, theirs = quantize(value.numpy(), qparams), self.integers[name]
        worst = self.report.add("op_by_op", node.name, mine, theirs)
        if self.disagreement is None and worst > self.report.max_lsb:
            self.disagreement = Disagreement(node.name, mine, theirs, qparams)
        return type(value)(dequantize(theirs, qparams))


class EndToEnd(Interpreter):
    """Runs the graph alone and keeps the integers of every site."""

    def __init__(self, converted: QuantizedModel, names: dict[str, str], report: VerifyReport) -> None:
        super().__init__(converted.module)
        self.names, self.report = names, report
        self.qparams = _integer_qparams(converted)
        self.found: dict[str, np.ndarray] = {}
        self.inputs: list[np.ndarray] = []
        self.outputs: list[np.ndarray] = []

    def on_node(self, node: Node, value: Any) -> Any:
        """Notes the values of graph inputs and the integers of sites."""
        if isinstance(node.expr, Input) and isinstance(node, TensorNode):
            self.inputs.append(value.numpy())
        if node.name in self.names:
            self.found[node.name] = quantize(value.numpy(), self.qparams[node.name])
        return value

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs the graph and keeps its inputs, outputs and integers."""
        result = self.run(*args, **kwargs)
        self.outputs = [t.numpy() for t in leaves(result)]

    def tally(self, integers: dict[str, np.ndarray], mode: str) -> None:
        """Tallies the integers found by `compute` against those of a run."""
        for node, mine in self.found.items():
            self.report.add(mode, node, mine, integers[self.names[node]])


def leaves(value: Any) -> list[Any]:
    """The tensors in what a graph gives, in the order of its outputs."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]
