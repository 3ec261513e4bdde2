"""bisect: the first op, in graph order, whose integers differ from the runtime's, and the likely cause."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.data.batches import as_arguments, evaluating, refuse_nan, told
from qtrace.errors import CalibrationError
from qtrace.graph.table import format_table
from qtrace.graph.types import Node, TracedModule
from qtrace.numerics import quantize
from qtrace.preparation.annotation import ExprNote
from qtrace.preparation.model import QuantizedModel
from qtrace.process.thread import on_engine_thread
from qtrace.scheme import QParams
from qtrace.verification.causes import likely_causes
from qtrace.verification.crosscheck import Disagreement, cross_check
from qtrace.verification.report import CrossCheck, VerifyReport, output_sqnr_db
from qtrace.verification.runtimes import get as get_runtime
from qtrace.verification.verify import EndToEnd, OpByOp, integer_names, leaves, output_names, wrong_output

__all__ = ["Difference", "bisect"]

_EXAMPLES = 5
_KERNEL = "a kernel of MegEngine, which the graph is computed with; the file need not be changed"


@dataclass(frozen=True)
class Difference:
    """Where graph and runtime part.

    Where every integer is right and an output in float is not, ``site`` is that output: the counts are of
    floats there, ``worst`` is 0 and ``sqnr_db`` is a number.

    Attributes:
        site: the node whose integers differ first.
        op: what computes it, as ``explain`` writes it.
        path: the module path of that op.
        stage: "plain" (optimizations off) or "optimized": then a fused kernel of the runtime differs.
        batch: the number of the batch, from 0.
        inputs: the groups that the op reads, each with its parameters in words.
        qparams: the parameters of the site in words.
        worst: the largest difference in LSB.
        differing: how many values differ.
        values: how many there are.
        histogram: difference (runtime minus graph) in LSB -> how often, the most frequent ones.
        examples: rows of index, the value before rounding in LSB, the graph's and the runtime's integer; of a
            float output, the graph's value takes the first two places.
        causes: what the differences look like, the most likely first; where the graph is wrong, the op of
            MegEngine that is, and nothing about the file.
        check: which side is wrong, by a second evaluation of the op.
        sqnr_db: signal-to-noise ratio of a float output from the runtime's own integers; None for integers.
    """

    site: str
    op: str
    path: str
    stage: str
    batch: int
    inputs: tuple[str, ...]
    qparams: str
    worst: int
    differing: int
    values: int
    histogram: dict[int, int]
    examples: tuple[tuple[str, float, float, float], ...]
    causes: tuple[str, ...]
    check: CrossCheck
    sqnr_db: float | None = None

    def table(self) -> str:
        """The finding as text."""
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
        """The same as plain data."""
        return asdict(self)


@on_engine_thread
def bisect(
    path: str | os.PathLike[str],
    converted: TracedModule,
    batches: Iterable[Any],
    *,
    runtime: str | None = None,
    max_lsb: int = 1,
    min_equal: float = 0.999,
    min_sqnr_db: float = 35.0,
) -> Difference | None:
    """Finds the first op, in graph order, whose integers differ from the runtime's beyond the tolerance.

    Every op is computed from the runtime's own integers, so the op that is found makes the difference itself.
    Optimizations are off at first; if nothing is found, the runtime's optimized form is tried.

    Args:
        path: a file written by ``qtrace.export`` from ``converted``.
        converted: the converted module.
        batches: inputs as for ``qtrace.calibrate``.
        runtime: the name of the runtime; None for the one that the file is meant for.
        max_lsb: differences up to this are no finding,
        min_equal: unless fewer than this share of a batch's integers are equal: then the first op whose own
            share is clearly below it is.
        min_sqnr_db: smallest signal-to-noise ratio of an output computed from the runtime's own integers:
            what follows the last site, in float, has no integers to compare.

    Returns:
        The difference, or None when there is none on these batches.

    Raises:
        ExportError: when the file cannot be run or is not an export of ``converted``.
        CalibrationError: when there are no batches, or one does not fit the model.
    """
    model = QuantizedModel(converted, "converted")
    kept = list(batches)
    if not kept:
        raise CalibrationError("bisect has no batches: give at least one.")
    chosen, ends = get_runtime(Path(path), runtime), output_names(model)
    for stage, optimize in (("plain", False), ("optimized", True)):
        session = chosen.open(Path(path), optimize)
        names = integer_names(model, Path(path), session)
        for index, batch in enumerate(kept):
            args, kwargs = as_arguments(batch, converted, index)
            refuse_nan((args, kwargs), index)
            with evaluating(converted):
                graph = EndToEnd(model, names, VerifyReport(str(path), 0, 0.0, 0.0))
                with told(converted, (args, kwargs), index):
                    graph.compute(args, kwargs)
                ran = session.run(graph.inputs)
                search = _Search(model, names, ran.integers, (max_lsb, min_equal), str(path))
                outputs = [t.numpy() for t in leaves(search.run(*args, **kwargs))]
                if search.close():
                    check = cross_check(converted, (args, kwargs), search.values, search.first())
                    return _difference(model, search, check, stage, index)
                search.report.add_outputs("op_by_op", ends, outputs, ran.outputs)
                wrong = wrong_output(converted, outputs, ran.outputs, min_sqnr_db)
                if wrong is not None:
                    number, values = wrong
                    check = cross_check(converted, (args, kwargs), search.values, values)
                    note = _maker(model, ends[number])
                    return _float_difference(note, (ends[number], values), check, stage, index)
    return None


_Finding = tuple[str, np.ndarray, np.ndarray, np.ndarray]


class _Search(OpByOp):
    """Keeps the first site that differs by more than is allowed, and the first with too many differences."""

    def __init__(
        self,
        converted: QuantizedModel,
        names: dict[str, str],
        integers: dict[str, np.ndarray],
        tolerance: tuple[int, float],
        path: str,
    ) -> None:
        super().__init__(converted, names, integers, VerifyReport(path, 0, 0.0, 0.0))
        self.max_lsb, self.min_equal = tolerance
        self.weights = {s.name: s.qparams for s in converted.sites if s.sort == "weight"}
        self.sources = {n: s.node.name for n, s in converted.rounded.items() if s.sort == "activation"}
        self.kept = frozenset(self.sources.values())
        self.unrounded: dict[str, Any] = {}  # the values of nodes that sites round
        self.found: _Finding | None = None
        self.many: _Finding | None = None  # many differences, and at no later place than ``found``

    def on_node(self, node: Node, value: Any) -> Any:
        """Compares before the runtime's integers take the place of the graph's."""
        if self.found is None and node.name in self.kept:
            self.unrounded[node.name] = value
        if self.found is None and node.name in self.names:
            mine = quantize(value.numpy(), self.qparams[node.name]).astype(np.int64)
            theirs = self.integers[self.names[node.name]].astype(np.int64)
            x = self.unrounded.get(self.sources.get(node.name, ""), value).numpy()
            finding = node.name, x, mine, theirs
            if self.many is None and self._too_many(mine, theirs):
                self.many = finding
            if np.abs(mine - theirs).max(initial=0) > self.max_lsb:
                self.found = finding
        return super().on_node(node, value)

    def _too_many(self, mine: np.ndarray, theirs: np.ndarray) -> bool:
        """Whether the share of differing values is beyond the allowed one by more than chance."""
        allowed = mine.size * (1 - self.min_equal)
        return np.count_nonzero(mine != theirs) > allowed + 3 * np.sqrt(allowed) + 2

    def close(self) -> bool:
        """Whether the run, which is over, goes beyond the tolerance; ``found`` is then the site."""
        tallies = self.report.sites["op_by_op"].values()
        values = sum(t.values for t in tallies)
        # Without the sites that differ by more: those have a finding of their own.
        slight = sum(t.values - t.equal for t in tallies if t.worst <= self.max_lsb)
        if self.many is not None and slight > values * (1 - self.min_equal):
            self.found = self.many
        return self.found is not None

    def first(self) -> Disagreement:
        """The integers of the site that was found."""
        assert self.found is not None
        node, _, mine, theirs = self.found
        return Disagreement(node, mine, theirs, self.qparams[node])


def _difference(
    model: QuantizedModel, search: _Search, check: CrossCheck, stage: str, batch: int
) -> Difference:
    assert search.found is not None
    name, x, mine, theirs = search.found
    qparams = search.qparams[name]
    exact = _before_rounding(x, mine, qparams)
    delta = theirs - mine
    where = np.argsort(-np.abs(delta), axis=None, kind="stable")[:_EXAMPLES]
    places = [np.unravel_index(i, delta.shape) for i in where if delta.flat[i]]
    note = _maker(model, name)
    causes = likely_causes(exact, mine, theirs, qparams)
    if check.side == "graph":
        causes = (_KERNEL,)
    elif stage == "optimized":
        causes = ("a kernel that the runtime fuses: with optimizations off nothing differs", *causes)
    return Difference(
        site=name,
        op=note.op if note else "input",
        path=note.path if note else "",
        stage=stage,
        batch=batch,
        inputs=_read_by(model, note, {**search.qparams, **search.weights}),
        qparams=_words(qparams),
        worst=int(np.abs(delta).max()),
        differing=int(np.count_nonzero(delta)),
        values=delta.size,
        histogram={int(k): n for k, n in Counter(delta[delta != 0].tolist()).most_common(6)},
        examples=tuple((_index(p), float(exact[p]), int(mine[p]), int(theirs[p])) for p in places),
        causes=causes,
        check=check,
    )


# What each side's fault looks like behind the last integers.
_FLOAT_CAUSES = {
    "graph": _KERNEL,
    "runtime": "what follows the last integers: a weight, a bias or a scale there, since all sites agree",
    "unknown": "what follows the last integers, in the file or in MegEngine, since all sites agree",
}


def _float_difference(
    note: ExprNote | None, output: tuple[str, Disagreement], check: CrossCheck, stage: str, batch: int
) -> Difference:
    """An output in float that differs although the integers before it are the same."""
    name, mine, theirs = output[0], output[1].graph, output[1].runtime
    delta = np.nan_to_num(np.abs(theirs.astype(np.float64) - mine), nan=np.inf)
    where = np.argsort(-delta, axis=None, kind="stable")[:_EXAMPLES]
    places = [np.unravel_index(i, delta.shape) for i in where if delta.flat[i]]
    return Difference(
        site=name,
        op=note.op if note else "output",
        path=note.path if note else "",
        stage=stage,
        batch=batch,
        inputs=(),
        qparams="nothing: it is in float",
        worst=0,
        differing=int(np.count_nonzero(delta)),
        values=delta.size,
        histogram={},
        examples=tuple((_index(p), float(mine[p]), float(mine[p]), float(theirs[p])) for p in places),
        causes=(_FLOAT_CAUSES[check.side],),
        check=check,
        sqnr_db=output_sqnr_db(mine, theirs),
    )


def _index(place: tuple[Any, ...]) -> str:
    return f"[{', '.join(str(int(i)) for i in place)}]"


def _before_rounding(x: np.ndarray, mine: np.ndarray, qparams: QParams) -> np.ndarray:
    """``x`` in steps of the site's scale, from its zero point."""
    scale, zero = (np.asarray(v, np.float64) for v in (qparams.scale, qparams.zero_point))
    if scale.ndim:
        form = [1] * x.ndim
        form[qparams.scheme.axis or 0] = -1
        scale, zero = scale.reshape(form), zero.reshape(form)
    exact: np.ndarray = x.astype(np.float64) / scale + zero
    return exact


def _maker(model: QuantizedModel, name: str) -> ExprNote | None:
    """The op that computes a site's value: the first of its chain."""
    site = model.rounded.get(name)
    notes = {n.name: n for n in model.annotation.notes}
    note = notes.get(name if site is None else site.node.name)
    return notes.get(note.into, note) if note is not None and note.into else note


def _read_by(model: QuantizedModel, note: ExprNote | None, qparams: dict[str, QParams]) -> tuple[str, ...]:
    if note is None:
        return ()
    groups = {site.group: name for name, site in reversed(model.rounded.items())}
    found = []
    for group in dict.fromkeys(g for g in note.inputs if g):
        known = qparams.get(groups.get(group, ""))
        found.append(f"{group}: {_words(known)}" if known is not None else group)
    if note.weight:
        known = qparams.get(note.weight)
        found.append(f"{note.weight} (weight)" + (f": {_words(known)}" if known is not None else ""))
    return tuple(found)


def _words(qparams: QParams) -> str:
    if qparams.scale.ndim:
        return f"{qparams.scheme.describe()}, {qparams.scale.size} scales"
    return (
        f"{qparams.scheme.describe()}, scale {float(qparams.scale):.6g}, zero point {int(qparams.zero_point)}"
    )
