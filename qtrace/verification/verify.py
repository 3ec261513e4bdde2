"""Runs an exported file in its runtime, and compares it with its graph.

Two comparisons. *Op by op*: the graph computes every site from the integers that the runtime had for the
sites before it, so an error is seen at the op that makes it. *End to end*: both run from the same input, and
the runtime must come as close to float as the graph does.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.comparing.selections import SelectedShares, Share, differ
from qtrace.comparing.sums import EQUAL_DB, ErrorSums, sqnr_db
from qtrace.data.batches import as_arguments, check_batches, evaluating
from qtrace.errors import CalibrationError, ExportError, QtraceError
from qtrace.export import export
from qtrace.export.converted import PlainGraph, is_plain
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.external_data import read_model
from qtrace.onnxfile.kernels import has_large_signed_weights
from qtrace.plugins.options import check_arguments
from qtrace.preparation.model import QuantizedModel
from qtrace.process import LargeFrees, on_engine_thread, return_free_memory, returns_memory
from qtrace.runtimes.child import RefusalError
from qtrace.runtimes.host import RuntimeHost
from qtrace.verification.crosscheck import cross_check
from qtrace.verification.float_outputs import FloatOutputs
from qtrace.verification.other_sizes import at_other_sizes, by_sample
from qtrace.verification.report import VerifyReport
from qtrace.verification.runs import BatchRun, EndToEnd, File, OpByOp, SameRows, tied_inputs
from qtrace.verification.runtimes import describe_choice, runs_optimized
from qtrace.verification.runtimes import get as get_runtime
from qtrace.verification.runtimes.base import Runtime, RuntimeRun, Session, run_outputs
from qtrace.verification.selections import read_runtime_places
from qtrace.verification.tallies import CrossCheck, is_as_wrong

# Whether a runtime is at fault, not the file: it computes the float network otherwise than onnxruntime.

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_CURE = "no recipe changes that: use another runtime, or write the op otherwise"


class FloatCheck:
    """Runs the float network of a wrong file in the runtime of the file, and in onnxruntime.

    It finds no fault of runtimes that read other files, which onnxruntime cannot run, and of a user's own,
    which need not run float files.

    Args:
        path: the file.
        converted: the graph, or the plain module, that it was exported from.
        runtime: the runtime of the file.
        batches: the first batch, if there is one.
    """

    def __init__(self, path: Path, converted: TracedModule, runtime: Runtime, batches: Sequence[Any]) -> None:
        self._path, self._converted, self._runtime = path, converted, runtime
        self._worst: _Arguments | None = None
        self._applies = path.suffix.lower() == ".onnx" and runtime.name != "onnxruntime" and runtime.extra
        self._first, self._lowest = batches, math.inf

    def note(self, run: BatchRun) -> None:
        """Keeps the batch whose outputs differ most from the graph's."""
        ratio = _lowest_ratio(run.graph.outputs, run.runtime.outputs) if self._applies else math.inf
        if ratio < self._lowest:
            self._lowest, self._worst = ratio, run.arguments

    def find_fault(self) -> CrossCheck | None:
        """Returns that the runtime is at fault for the batch that was kept; None if the file may be."""
        if self._worst is None:
            return None
        try:
            right, own = self._run_float(self._worst)
        except QtraceError:
            return None
        ratio = _lowest_ratio(right, own)
        if not is_as_wrong(ratio, self._lowest):
            return None
        differs = f"{self._runtime.name} differs from onnxruntime in the float network, too ({ratio:.1f} dB)"
        return CrossCheck("float", f"{differs}; {_CURE}")

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Re-raises a refusal of the file, and outputs of other shapes, as an error that names the runtime.

        Raises:
            ExportError: naming the runtime, if the float network meets the same; else the error itself.
        """
        try:
            yield
        except ExportError as error:
            if not self._applies or not self._first or not (fault := self._find_same(error)):
                raise
            raise ExportError(
                f"{self._path.name}: {self._runtime.name} is at fault, not the file: {fault}; {_CURE}."
            ) from error

    def _find_same(self, error: ExportError) -> str:
        """Returns what the runtime does to the float network as it does to the file; "" if it does not."""
        try:
            right, own = self._run_float(as_arguments(self._first[0], self._converted, 0))
        except RefusalError as refusal:
            same = isinstance(error, RefusalError)
            return f"it refuses the float network, too, with {refusal.reason!r}" if same else ""
        except QtraceError:
            return ""
        shapes = ((a.shape, b.shape) for a, b in zip(right, own, strict=False))
        sizes = next(((a, b) for a, b in shapes if a != b), None)
        if sizes is None or isinstance(error, RefusalError):
            return ""
        return f"an output of the float network has shape {sizes[1]} there, and {sizes[0]} in onnxruntime"

    def _run_float(self, arguments: _Arguments) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the float outputs of onnxruntime and of the runtime for the arguments of one call.

        Raises:
            RefusalError: when the runtime refuses the float network.
            QtraceError: when onnxruntime does, or the network lacks a float file.
        """
        _, (_, *tensors) = Interpreter(self._converted).bind(*arguments)
        inputs = [tensor.numpy() for tensor in tensors]
        with tempfile.TemporaryDirectory(prefix="qtrace-float-") as folder:
            file = self._path
            if not is_plain(self._converted):
                file = export(self._converted, Path(folder) / "float.onnx", format="onnx_float")
            runtimes = (get_runtime(file, "onnxruntime"), self._runtime)
            right, own = (run_outputs(runtime.open(file, False), inputs) for runtime in runtimes)
        return right, own


def _lowest_ratio(right: Sequence[np.ndarray], own: Sequence[np.ndarray]) -> float:
    """Returns the ratio of the worst output in dB, of those that have the same shape."""
    both = [(a, b) for a, b in zip(right, own, strict=False) if a is not None and b is not None]
    return min((sqnr_db(a, b) for a, b in both if a.shape == b.shape), default=math.inf)


# verify: runs an exported file in its real runtime and compares its integers with the graph's.

# The limits for outputs that float ops compute from the same integers, and for the outputs of float files.
# Engines differ in the order of sums, in approximations of functions, and in fast forms of convolutions,
# which cost ncnn 60 dB of the 135 that it has without.
_SQNR_DB = 35.0


@check_arguments
@on_engine_thread
@returns_memory
def verify(
    path: str | os.PathLike[str],
    converted: TracedModule,
    batches: Iterable[Any],
    *,
    float_model: TracedModule | None = None,
    runtime: str | Runtime | None = None,
    runtime_host: RuntimeHost | None = None,
    optimized: bool = True,
    max_lsb: int = 1,
    min_equal: float = 0.999,
    min_sqnr_db: float | None = None,
) -> VerifyReport:
    """Runs ``path`` in its runtime and compares it with ``converted``, integer by integer.

    An ONNX file with open axes besides the batch is also run at two other sizes, to which the first sample is
    repeated. These are a larger one, and a smaller one where the axes are long enough and the graph runs
    there, else a still larger one. The logger ``qtrace`` names them.

    Args:
        path: a file written by ``qtrace.export`` from ``converted``.
        converted: the converted module; or a plain traced module, whose outputs are compared end to end.
        batches: inputs as for ``qtrace.calibrate``.
        float_model: the float network as traced, or prepared, which outputs are compared to from end to end;
            None for ``converted`` without its roundings: another network if training or ``ptq`` changed it.
        runtime: the name of the runtime, or a `Runtime`, such as `dumped_tensors` returns; None for the one
            that the file is meant for, or onnxruntime without optimizations if that is not installed here.
        runtime_host: the interpreter or machine that has the runtime; None for this one.
        optimized: whether to also run the file with all graph optimizations, as it will be deployed. A file
            that was not written for onnxruntime is not run so in onnxruntime.
        max_lsb: largest difference allowed at any site, op by op.
        min_equal: smallest share of equal values allowed over all sites, op by op.
        min_sqnr_db: smallest signal-to-noise ratio allowed at each column group of the outputs, computed from
            the runtime's own integers and from end to end. None allows 35 dB at the former, and 60 dB for a
            plain module. From end to end, a converted module is then compared only to float. In each column
            group the runtime's noise may be 1 dB larger than the graph's, and its predictions must be float's
            as often, but for what chance explains.

    Returns:
        A report; its ``passed`` says whether the tolerances hold.

    Raises:
        ExportError: when the file cannot be run or is not an export of ``converted``, or the host cannot be
            reached or does not answer.
        CalibrationError: when there are no batches, or one does not fit the model or holds NaN.
        GraphError: when ``float_model`` is another network.
    """
    check_batches(batches)
    plain = is_plain(converted)
    limit = min_sqnr_db if min_sqnr_db is not None else EQUAL_DB if plain else _SQNR_DB
    path = Path(path)
    model = PlainGraph(converted).model if plain else QuantizedModel(converted, "converted")
    backend = "" if plain else model.annotation.backend
    chosen = get_runtime(path, runtime, runtime_host, backend)
    batches = iter(batches)
    first, own = list(itertools.islice(batches, 1)), isinstance(runtime, Runtime)
    check = FloatCheck(path, converted, chosen, first)
    with check.explain():
        file = File(path, model, by_sample(chosen.open(path, False), model))
        optimized = optimized and runs_optimized(chosen, backend)
        deployed = by_sample(chosen.open(path, True), model) if optimized else None
        report = file.report(max_lsb, min_equal, limit)
        report.side, report.client = getattr(file.session, "side", {}), getattr(file.session, "remark", "")
        report.runtime = describe_choice(chosen, backend) if runtime is None else ""
        report.end_to_end_db = limit if plain else min_sqnr_db
        exact = None if plain else FloatOutputs(model, float_model)
        report.float_source = "" if exact is None else exact.source
        if exact is not None and (selected := SelectedShares.of(converted)):
            report.selected = selected
        if deployed is not None and not plain and chosen.kernels is not None:
            report.kernels = chosen.kernels(path)
        if backend == "generic" and path.suffix.lower() == ".onnx":
            report.unknown_processor = has_large_signed_weights(read_model(path))
        return_free_memory()  # of sessions that were opened
        with evaluating(model.module):
            floats, frees = exact or FloatOutputs(model, None), LargeFrees()

            def others() -> list[list[tuple[np.ndarray, ...]]]:
                return at_other_sizes(path, converted, first[0]) if first and not own else []

            def op_by_op(file: File, integers: dict[str, np.ndarray]) -> OpByOp:
                return OpByOp(file, integers, report)

            for run in file.run(itertools.chain(first, batches), op_by_op, floats, others, deployed):
                if report.cross_check is None and not plain:
                    _cross_check(file, converted, run, limit, report)
                _compare_outputs(file, run, deployed, exact, report)
                check.note(run)
                freed = sum(integers.nbytes for integers in run.runtime.integers.values())
                del run  # its integers, before the next batch has its own
                frees.note(freed)
    if report.kernels is not None and report.kernels.wrong and not report.passed:
        from qtrace.export.onnx.whole_columns import has_odd_columns

        # Without such columns another kernel is at fault.
        report.kernels = replace(report.kernels, wrong=has_odd_columns(path))
    if not first:
        raise CalibrationError("verification data holds no batches: give at least one.")
    if not report.passed and (fault := check.find_fault()) is not None:
        node, _ = report.cross_check or report.weakest_output()
        report.cross_check = (node, fault)
    return report


def _cross_check(
    file: File, converted: TracedModule, run: BatchRun, min_sqnr_db: float, report: VerifyReport
) -> None:
    """Evaluates the first op of a batch that differs by too much again, if there is one."""
    different = run.single.disagreement or file.find_wrong_output(run, min_sqnr_db)
    if different is not None:
        check = cross_check(converted, run.arguments, run.single.values, different)
        report.cross_check = (different.node, check)


def _compare_outputs(
    file: File, run: BatchRun, deployed: Session | None, exact: FloatOutputs | None, report: VerifyReport
) -> None:
    """Compares the outputs of a batch from end to end, and the outputs of the optimized file if it is run."""
    rows = _Rows(file, run, exact)
    if report.selected is not None:
        report.selected.add(rows.shares)
    _compare_run(file, file.session, run, run.runtime, rows, "end_to_end", report)
    if deployed is not None and run.deployed is not None:
        optimized = run.deployed()
        places = run.single.tape.places
        if run.graph.tape.places and optimized.integers:
            single = OpByOp(file, optimized.integers, file.report(report.max_lsb, report.min_equal, 0.0))
            file.lanes.run([single], *run.arguments)
            places = single.tape.places
        run = _compare_run(file, deployed, run, optimized, rows, "deployed", report, places)
        if _ratio(run.graph.outputs, optimized.outputs) < _SQNR_DB:
            _check_optimized(file, run, optimized, report)


def _compare_run(
    file: File,
    session: Session,
    run: BatchRun,
    runtime: RuntimeRun,
    rows: _Rows,
    mode: str,
    report: VerifyReport,
    places: Sequence[np.ndarray] | None = None,
) -> BatchRun:
    """Compares a run of a runtime with the graph, which takes the runtime's integers of inputs at ties.

    Args:
        file: the file.
        session: what has run it.
        run: the batch.
        runtime: the run.
        rows: the outputs of float and of the graph.
        mode: "end_to_end" or "deployed".
        report: the report, to which the differences are added.
        places: what the runtime selects where it does not tell that; None for what the graph selects from
            the runtime's integers without optimizations.

    Returns:
        The batch with the run of the graph that was compared.
    """
    tied = tied_inputs(file, run.graph, runtime)
    if tied:
        graph = EndToEnd(file, given=tied)
        graph.compute_in(file.lanes, *run.arguments)
        run = replace(run, graph=graph, floats=None)
        rows = _Rows(file, run, rows.exact)
    own = run.single.tape.places if places is None else places
    told = read_runtime_places(file.model.module, getattr(session, "place_kinds", ()), runtime.places, own)
    same = rows.of(own)
    if differ(own, told):
        # A file that was changed after the export may tell places of something else.
        same = max(same, rows.of(told), key=lambda rows: _ratio(rows.graph, runtime.outputs))
    run.graph.tally(runtime, mode, report, file.output_names, same)
    return run


class _Rows:
    """Computes the outputs of float and of the graph for what the runtime selects.

    Args:
        file: the file.
        run: one batch.
        exact: the float network; None for none.

    Attributes:
        floats: float's outputs, with what the graph selects; () without a network.
        shares: how many of the places that the graph selects are float's.
    """

    def __init__(self, file: File, run: BatchRun, exact: FloatOutputs | None) -> None:
        self.file, self.run, self.exact = file, run, exact
        self.floats: Sequence[np.ndarray] = ()
        self.shares: Sequence[Share] = ()
        if exact is not None:
            places = run.graph.tape.places
            self.floats, self.shares = run.floats or exact.replay(*run.arguments, run.number, places)

    def of(self, places: Sequence[np.ndarray]) -> SameRows:
        """Returns float's outputs and the graph's with the runtime's selections.

        Args:
            places: what the runtime selects, where it reads its own integers.
        """
        if not differ(self.run.graph.tape.places, places):
            return SameRows(self.floats, self.floats, self.run.graph.outputs, self.shares, self.shares)
        graph = EndToEnd(self.file, places, self.run.graph.given)
        graph.compute_in(self.file.lanes, *self.run.arguments)
        if self.exact is None:
            return SameRows((), (), graph.outputs)
        replayed, shares = self.exact.replay(*self.run.arguments, self.run.number, places)
        return SameRows(self.floats, replayed, graph.outputs, self.shares, shares)


def _ratio(graph: Sequence[np.ndarray], runtime: Sequence[np.ndarray]) -> float:
    """Returns the ratio of all outputs of a batch to the graph's, in dB."""
    sums = ErrorSums()
    for own, other in zip(graph, runtime, strict=True):
        if other is not None and own.shape == other.shape:
            sums.add(own, other)
    return sums.sqnr_db


def _check_optimized(file: File, run: BatchRun, optimized: RuntimeRun, report: VerifyReport) -> None:
    """Compares the optimized form op by op, too: from end to end, ties may hide a wrong kernel."""
    scratch = file.report(report.max_lsb, report.min_equal, report.min_sqnr_db)
    scratch.sites["op_by_op"] = report.optimized
    file.lanes.run([OpByOp(file, optimized.integers, scratch)], *run.arguments)
