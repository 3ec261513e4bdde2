"""bisect: the first op, in graph order, whose integers differ from the runtime's, and the likely cause."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.comparing.sums import sqnr_db
from qtrace.data.batches import check_batches, evaluating
from qtrace.display import Displayed, format_table
from qtrace.errors import SHOWN_NAMES, CalibrationError
from qtrace.graph.types import Node, TracedModule
from qtrace.plugins.options import check_arguments
from qtrace.preparation.annotation import ExprNote
from qtrace.preparation.model import QuantizedModel
from qtrace.process import on_engine_thread
from qtrace.runtimes.host import RuntimeHost
from qtrace.scheme import QParams
from qtrace.verification.crosscheck import Disagreement, cross_check, likely_causes, optimized_kernel_cause
from qtrace.verification.float_outputs import FloatOutputs
from qtrace.verification.other_sizes import by_sample
from qtrace.verification.report import VerifyReport
from qtrace.verification.runs import BatchRun, File, OpByOp
from qtrace.verification.runtimes import get as get_runtime
from qtrace.verification.runtimes import runs_optimized
from qtrace.verification.runtimes.base import Runtime
from qtrace.verification.tallies import CrossCheck, too_many
from qtrace.verification.verify import FloatCheck

_MEGENGINE_CAUSE = "a kernel of MegEngine, which computes the graph; the file need not be changed"
_RUNTIME_CAUSE = "the runtime, which computes the float network wrong, too"


@dataclass(frozen=True, repr=False, kw_only=True)
class FirstDifference(Displayed):
    """The first op at which graph and runtime differ.

    If every integer is right and an output in float is not, ``site`` is that output: the counts are of
    floats, ``worst`` is 0 and ``sqnr_db`` is a number.

    Attributes:
        site: the node whose integers differ first.
        op: the op that computes the site, as ``explain`` writes it.
        path: the module path of that op.
        stage: "plain" (optimizations off) or "optimized": then an optimized kernel of the runtime differs.
        batch: the number of the batch, from 0.
        inputs: the groups that the op reads, each with its parameters in words.
        qparams: the parameters of the site in words.
        worst: the largest difference in LSB.
        differing: how many values differ.
        values: how many values were compared.
        histogram: difference (runtime minus graph) in LSB -> number of values, for the most frequent ones.
        examples: rows of index, the value before rounding in LSB, the graph's and the runtime's integer; of a
            float output, the graph's value takes the first two places.
        causes: the likely causes, the most likely first; if the graph is wrong, only MegEngine's kernel.
        check: which side is wrong, by a second evaluation of the op.
        sqnr_db: signal-to-noise ratio of a float output from the runtime's own integers; None for integers.
        rows: if nothing else differs, the tensor that has another number of rows, and why; else "". ``op``
            is then the op that selects the rows.
    """

    site: str
    op: str
    path: str = ""
    stage: str
    batch: int
    inputs: tuple[str, ...] = ()
    qparams: str
    worst: int = 0
    differing: int = 0
    values: int = 0
    histogram: dict[int, int] = field(default_factory=dict)
    examples: tuple[tuple[str, float, float, float], ...] = ()
    causes: tuple[str, ...]
    check: CrossCheck
    sqnr_db: float | None = None
    rows: str = ""

    def table(self) -> str:
        """Returns the difference as text."""
        if self.rows:
            causes = (f"  {cause}" for cause in self.causes)
            return "\n".join(
                [f"{self.site}, batch {self.batch}, {self.stage} runtime", f"  {self.rows}", *causes]
            )
        if self.sqnr_db is None:
            amount = f"{self.differing} of {self.values} integers differ, by {self.worst} LSB at most"
            steps = ", ".join(f"{k:+d} LSB x {n}" for k, n in self.histogram.items())
            headers: tuple[str, ...] = ("index", "before rounding", "graph", "runtime")
            rows: list[tuple[str, ...]] = [(i, f"{x:.4f}", str(a), str(b)) for i, x, a, b in self.examples]
        else:
            amount = f"{self.differing} of {self.values} floats differ: {self.sqnr_db:.1f} dB"
            steps, headers = "", ("index", "graph", "runtime")
            rows = [(i, f"{a:.6g}", f"{b:.6g}") for i, _, a, b in self.examples]
        lines = [
            f"{self.site}: {self.op}{f' in {self.path}' if self.path else ''}, batch {self.batch}, "
            f"{self.stage} runtime",
            f"  {amount}",
            f"  rounds to {self.qparams}",
            *(f"  reads {text}" for text in self.inputs),
            *([f"  runtime minus graph: {steps}"] if steps else []),
            f"  which side: {self.check.sentence()}",
            *(f"  likely: {cause}" for cause in self.causes),
            format_table(headers, rows),
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the difference as plain data."""
        return asdict(self)


@check_arguments
@on_engine_thread
def bisect(
    path: str | os.PathLike[str],
    converted: TracedModule,
    batches: Iterable[Any],
    *,
    runtime: str | Runtime | None = None,
    runtime_host: RuntimeHost | None = None,
    max_lsb: int = 1,
    min_equal: float = 0.999,
    min_sqnr_db: float = 35.0,
) -> FirstDifference | None:
    """Finds the first op, in graph order, whose integers differ from the runtime's beyond the tolerance.

    The graph computes every op from the runtime's own integers, so the op that is named makes the difference
    itself. The runtime runs without optimizations first, and with them if no op differs without.

    Args:
        path: a file written by ``qtrace.export`` from ``converted``.
        converted: the converted module.
        batches: inputs as for ``qtrace.calibrate``.
        runtime: the name of the runtime, or a `Runtime`, such as `dumped_tensors` returns; None for the one
            that the file is meant for, or onnxruntime without optimizations if that is not installed here.
        runtime_host: the interpreter or machine that has the runtime; None for this one.
        max_lsb: largest difference allowed at any site.
        min_equal: smallest share of equal integers allowed in a batch; below it, the first op whose own share
            is clearly lower is named, even if it differs by ``max_lsb`` at most.
        min_sqnr_db: smallest signal-to-noise ratio of a column group of an output computed from the runtime's
            own integers: the ops after the last site compute in float and lack integers to compare.

    Returns:
        The difference, or None when there is none on these batches.

    Raises:
        ExportError: when the file cannot be run or is not an export of ``converted``.
        CalibrationError: when there are no batches, or one does not fit the model.
    """
    model = QuantizedModel(converted, "converted")
    check_batches(batches)
    inputs = list(batches)
    if not inputs:
        raise CalibrationError("bisect got no batches: give at least one.")
    chosen = get_runtime(Path(path), runtime, runtime_host, model.annotation.backend)
    unequal = None
    stages = 2 if runs_optimized(chosen, model.annotation.backend) else 1
    float_check = FloatCheck(Path(path), converted, chosen, inputs)
    with float_check.explain():
        for stage, optimize in (("plain", False), ("optimized", True))[:stages]:
            file = File(Path(path), model, by_sample(chosen.open(Path(path), optimize), model))
            side = getattr(file.session, "side", {})
            with evaluating(converted):
                exact = FloatOutputs(model, None)
                for run in file.run(
                    inputs, lambda f, n: _Search(f, n, f.report(max_lsb, min_equal, min_sqnr_db)), exact
                ):
                    assert isinstance(run.single, _Search)
                    finding = run.single.close() or _wrong_output(file, run, min_sqnr_db)
                    if finding is not None:
                        float_check.note(run)
                        check = float_check.find_fault() or cross_check(
                            converted, run.arguments, run.single.values, finding.both
                        )
                        return _difference(model, finding, check, (stage, chosen.name), run, side)
                    unequal = unequal or _unequal_rows(file, run, stage)
    return unequal


@dataclass(frozen=True)
class _Finding:
    """A node whose values differ.

    Attributes:
        name: the node, or the output by its name in files.
        both: the values of both sides.
        unrounded: the graph's value before rounding.
    """

    name: str
    both: Disagreement
    unrounded: np.ndarray


def _wrong_output(file: File, run: BatchRun, min_sqnr_db: float) -> _Finding | None:
    """Finds an output in float that differs although the integers before it are the same."""
    both = file.find_wrong_output(run, min_sqnr_db)
    if both is None:
        return None
    names = {n.name: name for n, name in zip(file.model.module.graph.outputs, file.output_names, strict=True)}
    return _Finding(names[both.node], both, both.graph)


def _unequal_rows(file: File, run: BatchRun, stage: str) -> FirstDifference | None:
    """Reports rows that both sides select differently from the same integers."""
    tensor = next(iter(run.single.report.unequal.get("op_by_op", ())), None)
    if tensor is None:
        return None
    name = tensor.partition(" ")[2]
    rows, *causes = run.single.report.remarks()
    return FirstDifference(
        site=name,
        op=file.selections[name],
        stage=stage,
        batch=run.number,
        qparams="nothing that can be compared",
        causes=tuple(causes),
        check=CrossCheck("unknown", "other rows cannot be compared"),
        rows=rows,
    )


class _Search(OpByOp):
    """Keeps the first site that differs by more than is allowed, and the first with too many differences."""

    def __init__(self, file: File, integers: dict[str, np.ndarray], report: VerifyReport) -> None:
        super().__init__(file, integers, report)
        model = file.model
        self.sources = {n: s.node.name for n, s in model.rounded.items() if s.sort == "activation"}
        self.kept = frozenset(self.sources.values())
        self.unrounded: dict[str, Any] = {}  # node -> its value, for nodes that sites round
        self.first: _Finding | None = None
        self.many: _Finding | None = None  # the first site with many differences, never after ``first``

    def on_node(self, node: Node, value: Any) -> Any:
        """Keeps the values before rounding, up to the first site that differs."""
        if self.first is None and node.name in self.kept:
            self.unrounded[node.name] = value
        return super().on_node(node, value)

    def on_integers(self, value: Any, both: Disagreement) -> None:
        """Compares before the runtime's integers take the place of the graph's."""
        super().on_integers(value, both)
        if self.first is None:
            unrounded = self.unrounded.get(self.sources.get(both.node, ""), value).numpy()
            finding = _Finding(both.node, both, unrounded)
            if self.many is None:
                differing = int(np.count_nonzero(both.graph != both.runtime))
                if too_many(differing, both.graph.size, self.report.least_equal(both.node)):
                    self.many = finding
            if self.disagreement is not None:
                self.first = finding

    def close(self) -> _Finding | None:
        """Returns the site at which the run, which is over, goes beyond the tolerance."""
        tallies = self.report.sites["op_by_op"].values()
        values = sum(t.values for t in tallies)
        # Sites that differ by more than ``max_lsb`` have a finding of their own.
        slight = sum(t.values - t.equal for t in tallies if t.worst <= self.report.max_lsb)
        if self.many is None:
            return self.first
        limit = self.report.least_equal(self.many.both.node)
        return self.many if too_many(slight, values, limit) else self.first


# The side that is wrong -> the cause, where all integers agree and a float output does not.
_FLOAT_CAUSES = {
    "graph": _MEGENGINE_CAUSE,
    "float": _RUNTIME_CAUSE,
    "runtime": "what follows the last integers: a weight, a bias or a scale there, since all sites agree",
    "unknown": "what follows the last integers, in the file or in MegEngine, since all sites agree",
}


def _difference(
    model: QuantizedModel,
    finding: _Finding,
    check: CrossCheck,
    where: tuple[str, str],
    run: BatchRun,
    side: Mapping[str, Any],
) -> FirstDifference:
    """Describes a finding; ``where`` is the stage and the runtime's name, ``side`` what ran elsewhere."""
    stage, runtime_name = where
    qparams, graph, runtime = finding.both.qparams, finding.both.graph, finding.both.runtime
    unrounded = finding.unrounded if qparams is None else _before_rounding(finding.unrounded, qparams)
    delta = runtime.astype(np.float64) - graph
    size = np.nan_to_num(np.abs(delta), nan=np.inf)
    order = np.argsort(-size, axis=None, kind="stable")[:SHOWN_NAMES]
    places = [np.unravel_index(i, size.shape) for i in order if size.flat[i]]
    note = _producer(model, finding.name)
    groups: tuple[str, ...] = ()
    if qparams is None:
        causes: tuple[str, ...] = (_FLOAT_CAUSES[check.side],)
    else:
        weights = {site.name: site.qparams for site in model.sites if site.sort == "weight"}
        groups = _describe_inputs(model, note, {**run.single.qparams, **weights})
        causes = likely_causes(unrounded, graph, runtime.astype(np.int64), qparams)
        if check.side in ("graph", "float"):
            causes = (_FLOAT_CAUSES[check.side],)
        elif stage == "optimized":
            causes = (optimized_kernel_cause(runtime_name, note.kind if note else "", side), *causes)
            causes = tuple(cause for cause in causes if not cause.startswith("unknown"))
    if stage == "optimized" and check.side == "runtime":
        correct = "with optimizations off the runtime gives them too, so the file is right"
        check = replace(check, reason=f"{check.reason}; {correct}")
    number = float if qparams is None else int
    return FirstDifference(
        site=finding.name,
        op=note.op if note else ("output" if qparams is None else "input"),
        path=note.path if note else "",
        stage=stage,
        batch=run.number,
        inputs=groups,
        qparams="nothing: it is in float" if qparams is None else _describe_qparams(qparams),
        worst=0 if qparams is None else int(size.max()),
        differing=len(np.flatnonzero(size)),
        values=size.size,
        histogram={}
        if qparams is None
        else {int(k): n for k, n in Counter(delta[delta != 0].tolist()).most_common(6)},
        examples=tuple(
            (_format_index(p), float(unrounded[p]), number(graph[p]), number(runtime[p])) for p in places
        ),
        causes=causes,
        check=check,
        sqnr_db=sqnr_db(graph, runtime) if qparams is None else None,
    )


def _format_index(place: tuple[Any, ...]) -> str:
    return f"[{', '.join(str(int(i)) for i in place)}]"


def _before_rounding(x: np.ndarray, qparams: QParams) -> np.ndarray:
    """Returns ``x`` in steps of the site's scale, with the zero point added."""
    scale, zero = (np.asarray(v, np.float64) for v in (qparams.scale, qparams.zero_point))
    if scale.ndim:
        shape = [1] * x.ndim
        shape[qparams.scheme.axis or 0] = -1
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    steps: np.ndarray = x.astype(np.float64) / scale + zero
    return steps


def _producer(model: QuantizedModel, name: str) -> ExprNote | None:
    """Returns the op that computes a site's value: the head of its chain."""
    site = model.rounded.get(name)
    notes = {n.name: n for n in model.annotation.notes}
    note = notes.get(name if site is None else site.node.name)
    return notes.get(note.into, note) if note is not None and note.into else note


def _describe_inputs(
    model: QuantizedModel, note: ExprNote | None, qparams: dict[str, QParams]
) -> tuple[str, ...]:
    """Lists the groups and the weight that an op reads, each with its parameters."""
    if note is None:
        return ()
    groups = {site.group: name for name, site in reversed(model.rounded.items())}
    lines = []
    for group in dict.fromkeys(g for g in note.inputs if g):
        known = qparams.get(groups.get(group, ""))
        lines.append(f"{group}: {_describe_qparams(known)}" if known is not None else group)
    if note.weight:
        known = qparams.get(note.weight)
        lines.append(
            f"{note.weight} (weight)" + (f": {_describe_qparams(known)}" if known is not None else "")
        )
    return tuple(lines)


def _describe_qparams(qparams: QParams) -> str:
    if qparams.scale.ndim:
        return f"{qparams.scheme.describe()}, {qparams.scale.size} scales"
    return (
        f"{qparams.scheme.describe()}, scale {float(qparams.scale):.6g}, zero point {int(qparams.zero_point)}"
    )
