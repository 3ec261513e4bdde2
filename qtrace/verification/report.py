"""The report of verify: the integer differences at every site, and the noise at the outputs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from qtrace.errors import ExportError
from qtrace.graph.table import format_table
from qtrace.metrics import ErrorSums, finite_or_none, sqnr_db
from qtrace.verification.runtimes.base import Kernels
from qtrace.verification.selections import Shape, describe_rows

__all__ = ["CrossCheck", "DifferenceTally", "VerifyReport"]

_MODES = ("op_by_op", "end_to_end", "deployed")
_SHOWN_STEPS = 6


@dataclass
class DifferenceTally:
    """Counts the differences between runtime and graph at one site.

    Attributes:
        values: the number of values that were compared.
        equal: the number of equal values.
        worst: the largest difference in LSB.
        histogram: difference (runtime minus graph, in LSB, without 0) -> number of values.
    """

    values: int = 0
    equal: int = 0
    worst: int = 0
    histogram: dict[int, int] = field(default_factory=dict)

    def add(self, graph: np.ndarray, runtime: np.ndarray) -> int:
        """Counts the differences of two arrays of integers of equal shape; returns the largest one."""
        difference = runtime.astype(np.int64) - graph.astype(np.int64)
        nonzero = difference[difference != 0]
        worst = int(np.abs(nonzero).max(initial=0))
        self.values += difference.size
        self.equal += difference.size - nonzero.size
        self.worst = max(self.worst, worst)
        for step, count in zip(*np.unique(nonzero, return_counts=True), strict=True):
            self.histogram[int(step)] = self.histogram.get(int(step), 0) + int(count)
        return worst


@dataclass(frozen=True)
class CrossCheck:
    """The outcome of a second evaluation of an op whose values differ between graph and runtime.

    Attributes:
        side: the side that is wrong: "graph" (a kernel of MegEngine), "runtime" (the exported file, or a
            kernel of the runtime), or "unknown".
        reason: the evidence, as a clause.
    """

    side: Literal["graph", "runtime", "unknown"]
    reason: str

    def sentence(self) -> str:
        """Returns the verdict and its evidence as one sentence."""
        return f"{_SIDES[self.side]}: {self.reason}"


_SIDES = {
    "graph": "the graph is wrong, not the file",
    "runtime": "the file or the runtime is wrong, not the graph",
    "unknown": "either side may be wrong",
}


@dataclass
class VerifyReport:
    """The outcome of ``qtrace.verify``.

    The modes: ``op_by_op`` computes each op from the runtime's own integers, optimizations off;
    ``end_to_end`` computes both sides from the same input, optimizations off; ``deployed`` does so with
    all optimizations.

    Attributes:
        path: the file.
        max_lsb: largest difference allowed op by op.
        min_equal: smallest share of equal values allowed op by op.
        min_sqnr_db: smallest ratio allowed at the outputs, in dB.
        sites: mode -> node -> tally.
        outputs: mode -> output -> its noise; "op_by_op" starts at the runtime's own integers, so it shows
            whether both sides compute alike what follows the last site, in float.
        kernels: which ops the runtime computes on integers when it is deployed; None where that is unknown.
        cross_check: the first node that differs by more than is allowed, op by op, and the second evaluation
            that says which side is wrong there; None where no node does.
        selections: node or output with a number of rows that depends on values -> the op that selects them.
        unequal: mode -> site or output -> its shapes in graph and runtime, for each batch that is not
            compared because such an op selects other rows, or the same rows in another order.
    """

    path: str
    max_lsb: int
    min_equal: float
    min_sqnr_db: float
    sites: dict[str, dict[str, DifferenceTally]] = field(default_factory=lambda: {m: {} for m in _MODES})
    outputs: dict[str, dict[str, ErrorSums]] = field(default_factory=dict)
    kernels: Kernels | None = None
    cross_check: tuple[str, CrossCheck] | None = None
    selections: Mapping[str, str] = field(default_factory=dict)
    unequal: dict[str, dict[str, list[tuple[Shape, Shape]]]] = field(default_factory=dict)

    def add(self, mode: str, node: str, graph: np.ndarray, runtime: np.ndarray) -> int:
        """Counts the differences at one site in one batch; returns the largest, or 0 for other rows.

        Raises:
            ExportError: when the two have different shapes that do not depend on values.
        """
        if not self.compares(mode, f"site {node}", graph, runtime):
            return 0
        return self.sites[mode].setdefault(node, DifferenceTally()).add(graph, runtime)

    def add_outputs(
        self,
        mode: str,
        names: Sequence[str],
        graph: Sequence[np.ndarray],
        runtime: Sequence[np.ndarray],
        selected: Collection[str] = (),
    ) -> None:
        """Adds the model's outputs of one batch.

        Args:
            mode: the comparison.
            names: the names of the outputs.
            graph: the graph's outputs.
            runtime: the runtime's outputs.
            selected: outputs whose rows depend on values; below the limit they are not compared, since both
                sides may have selected other rows.

        Raises:
            ExportError: when their number differs, or a shape that does not depend on values.
        """
        if len(graph) != len(runtime):
            raise ExportError(
                f"{self.path}: the number of outputs is {len(runtime)}, but {len(graph)} in the graph: "
                "export it again."
            )
        noises = self.outputs.setdefault(mode, {})
        for name, a, b in zip(names, graph, runtime, strict=True):
            if not self.compares(mode, f"output {name}", a, b):
                continue
            if name in selected and sqnr_db(a, b) < self.min_sqnr_db:
                self.note_rows(mode, f"output {name}", a, b)
            else:
                noises.setdefault(name, ErrorSums()).add(a, b, classes=True)

    def compares(self, mode: str, tensor: str, graph: np.ndarray, runtime: np.ndarray) -> bool:
        """Returns whether values can be compared; records numbers of rows that depend on values.

        Args:
            mode: the comparison.
            tensor: "site" or "output" and its name.
            graph: the graph's values.
            runtime: the runtime's values.

        Raises:
            ExportError: when they have different shapes that do not depend on values.
        """
        if graph.shape == runtime.shape:
            return True
        if tensor.partition(" ")[2] not in self.selections or graph.ndim != runtime.ndim:
            raise ExportError(
                f"{self.path}: {tensor} has shape {runtime.shape} in the runtime, but {graph.shape} in the "
                "graph: export it again."
            )
        self.note_rows(mode, tensor, graph, runtime)
        return False

    def note_rows(self, mode: str, tensor: str, graph: np.ndarray, runtime: np.ndarray) -> None:
        """Records a tensor of which graph and runtime have different rows."""
        self.unequal.setdefault(mode, {}).setdefault(tensor, []).append((graph.shape, runtime.shape))

    def worst_lsb(self, mode: str = "op_by_op") -> int:
        """Returns the largest difference at any site, in LSB."""
        return max((t.worst for t in self.sites[mode].values()), default=0)

    def equal_share(self, mode: str = "op_by_op") -> float:
        """Returns the share of equal integers over all sites."""
        values = sum(t.values for t in self.sites[mode].values())
        return sum(t.equal for t in self.sites[mode].values()) / values if values else 1.0

    def histogram(self, mode: str = "op_by_op") -> dict[int, int]:
        """Counts each difference (runtime minus graph, in LSB, without 0) over all sites, in order."""
        counts: dict[int, int] = {}
        for tally in self.sites[mode].values():
            for step, count in tally.histogram.items():
                counts[step] = counts.get(step, 0) + count
        return dict(sorted(counts.items()))

    def sqnr_db(self, mode: str = "reference") -> float:
        """Returns the signal-to-noise ratio over all of the runtime's outputs, in dB."""
        return self._total(mode).sqnr_db

    def weakest_output(self, mode: str = "reference") -> tuple[str, float]:
        """Returns the output with the lowest signal-to-noise ratio, and that ratio in dB."""
        name = min(self.outputs[mode], key=lambda n: self.outputs[mode][n].sqnr_db)
        return name, self.outputs[mode][name].sqnr_db

    def agreement(self, mode: str = "deployed") -> float:
        """Returns the share of samples whose largest output has the same index in graph and runtime."""
        share = self._total(mode if mode in self.outputs else "reference").agreement
        return 1.0 if share is None else share

    def _total(self, mode: str) -> ErrorSums:
        return sum(self.outputs[mode].values(), ErrorSums())

    @property
    def passed(self) -> bool:
        """Whether every tolerance holds."""
        return not self.problems()

    def problems(self) -> list[str]:
        """Lists the tolerances that do not hold, a line each."""
        problems = []
        if self.worst_lsb() > self.max_lsb:
            node = max(self.sites["op_by_op"], key=lambda n: self.sites["op_by_op"][n].worst)
            problems.append(f"site {node} differs by {self.worst_lsb()} LSB, {self.max_lsb} allowed")
        if self.equal_share() < self.min_equal:
            problems.append(
                f"{self.equal_share():.4%} of the integers are equal, {self.min_equal:.4%} needed"
            )
        problems += [
            f"output {name}, from the runtime's own integers, has {noise.sqnr_db:.1f} dB, "
            f"{self.min_sqnr_db:.1f} dB needed"
            for name, noise in self.outputs.get("op_by_op", {}).items()
            if noise.sqnr_db < self.min_sqnr_db
        ]
        problems += [
            f"outputs ({mode}) have {self.sqnr_db(mode):.1f} dB, {self.min_sqnr_db:.1f} dB needed"
            for mode in self.outputs
            if mode != "op_by_op" and self.sqnr_db(mode) < self.min_sqnr_db
        ]
        for tensor, shapes in itertools.islice(self.unequal.get("op_by_op", {}).items(), 1):
            problems.append(f"{describe_rows(tensor, shapes)}, from the same integers: it cannot be compared")
        if (worst := self._optimization_lsb()) is not None:
            problems.append(
                "sites (deployed) differ by {1} LSB, by {0} LSB without optimizations".format(*worst)
            )
        return problems

    def table(self, max_width: int = 140) -> str:
        """Returns a text table: a row for each site, then the totals."""
        headers = ("site", "values", "equal", "worst LSB", "end to end", "deployed")
        rows = []
        for node, tally in self.sites["op_by_op"].items():
            others = [self.sites[m].get(node) for m in _MODES[1:]]
            cells = ["" if t is None else f"{t.equal / t.values:.2%} / {t.worst}" for t in others]
            rows.append(
                (node, str(tally.values), f"{tally.equal / tally.values:.3%}", str(tally.worst), *cells)
            )
        return f"{format_table(headers, rows, max_width=max_width)}\n{self.summary()}"

    def summary(self) -> str:
        """Returns the totals and the verdict, in a few lines."""
        ratios = ", ".join(self._ratio(mode) for mode in self.outputs if mode != "op_by_op")
        lines = [
            f"op by op: worst {self.worst_lsb()} LSB, {self.equal_share():.4%} equal "
            f"over {len(self.sites['op_by_op'])} sites{self._differences()}",
            f"outputs: {ratios}; same prediction {self.agreement():.2%}",
            *(self.kernels.describe() if self.kernels is not None else ()),
            "passed" if self.passed else "FAILED: " + "; ".join(self.problems()),
            *self.remarks(),
        ]
        return "\n".join(lines)

    def remarks(self) -> list[str]:
        """Says what the problems mean, which side is wrong and what to do, a sentence each."""
        if self.passed:
            return self._row_remarks()
        if self.cross_check is not None:
            node, check = self.cross_check
            return [f"at {node}, {check.sentence()}"]
        floats = self.outputs.get("op_by_op", {}).values()
        if self.worst_lsb() > self.max_lsb or any(noise.sqnr_db < self.min_sqnr_db for noise in floats):
            return []
        if self.unequal and self._optimization_lsb() is None:
            return self._row_remarks()
        within = f"no op differs from the graph by more than {self.max_lsb} LSB"
        if self.equal_share() < self.min_equal:
            return [f"{within}, but many do: bisect names the first op that rounds in another way"]
        weak = [m for m in self.outputs if m != "op_by_op" and self.sqnr_db(m) < self.min_sqnr_db]
        if weak == ["deployed"] or self.unequal:
            return [
                f"no op is wrong with the runtime's optimizations off: {within}",
                "only the optimized form falls short of the limit: bisect compares that op by op, too",
            ]
        if any(not np.isfinite(self.sqnr_db(mode)) for mode in weak):
            return [f"{within}: an output is not finite on one side, from end to end only"]
        return [
            f"no op is wrong: {within} when both read the same integers",
            "the outputs differ because from end to end single LSBs (ties, the order of sums) add up, and "
            "later layers amplify them; this is no fault of the file",
            "what to do: measure the accuracy of the task with the file, and where it holds, call "
            f"qtrace.verify with a smaller min_sqnr_db, such as {self._next_limit():g}",
        ]

    def _optimization_lsb(self) -> tuple[int, int] | None:
        """Returns the largest differences before selections, plain and optimized, if the latter is larger.

        Outputs that are not compared cannot show that an optimization of the runtime is wrong.
        """
        plain, fused = (
            max((t.worst for n, t in self.sites[mode].items() if n not in self.selections), default=0)
            for mode in _MODES[1:]
        )
        return (plain, fused) if "deployed" in self.unequal and fused > plain + self.max_lsb else None

    def _row_remarks(self) -> list[str]:
        """Says what it means that graph and runtime select different rows, a sentence each."""
        if not self.unequal:
            return []
        mode, tensors = next((m, self.unequal[m]) for m in (*_MODES, "reference") if m in self.unequal)
        tensor, shapes = next(iter(tensors.items()))
        origin = self.selections[tensor.partition(" ")[2]]
        others = f", so have {len(tensors) - 1} more behind it" if len(tensors) > 1 else ""
        within = f"no op that was compared differs by more than {self.max_lsb} LSB op by op"
        remedy = (
            "what to do: measure the accuracy of the task with the file; the layers before the selection can "
            "be verified alone (qtrace.prepare with outputs=)"
        )
        if mode == "op_by_op":
            cause = "both read the same integers, but decide values next to a threshold, or ties, otherwise"
        else:
            sites = self.sites["end_to_end"].items()
            first = next((f", first {n} by {t.worst} LSB" for n, t in sites if t.equal < t.values), "")
            cause = f"from end to end integers differ{first}, and one LSB moves values over a threshold"
            remedy = f"this is no fault of the file; {remedy}"
        return [
            f"{describe_rows(tensor, shapes)}{others}: its rows depend on values, which {origin} selects",
            f"{within}; {cause}; these rows are not compared",
            remedy,
        ]

    def _next_limit(self) -> float:
        """Returns the highest multiple of 5 dB that the outputs reach."""
        lowest = min(self.sqnr_db(mode) for mode in self.outputs if mode != "op_by_op")
        return 5.0 * float(np.floor(lowest / 5.0)) if np.isfinite(lowest) else 0.0

    def _ratio(self, mode: str) -> str:
        if not self.outputs[mode]:
            return f"{mode} not compared"
        total, (name, weakest) = self.sqnr_db(mode), self.weakest_output(mode)
        lowest = f" ({name} alone {weakest:.1f})" if f"{weakest:.1f}" != f"{total:.1f}" else ""
        return f"{mode} {total:.1f} dB{lowest}"

    def _differences(self) -> str:
        """Lists the most frequent differences."""
        steps = sorted(self.histogram().items(), key=lambda item: -item[1])
        shown = ", ".join(f"{step:+d} LSB x {count}" for step, count in steps[:_SHOWN_STEPS])
        more = f" and {len(steps) - _SHOWN_STEPS} more" if len(steps) > _SHOWN_STEPS else ""
        return f" ({shown}{more})" if steps else ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        return {
            "path": self.path,
            "passed": self.passed,
            "problems": self.problems(),
            "remarks": self.remarks(),
            "worst_lsb": {m: self.worst_lsb(m) for m in _MODES if self.sites[m]},
            "histogram": {m: self.histogram(m) for m in _MODES if self.sites[m]},
            "equal_share": {m: self.equal_share(m) for m in _MODES if self.sites[m]},
            "sqnr_db": {m: finite_or_none(self.sqnr_db(m)) for m in self.outputs},
            "outputs": {
                m: {name: finite_or_none(n.sqnr_db) for name, n in noises.items()}
                for m, noises in self.outputs.items()
            },
            "agreement": self.agreement(),
            "unequal_rows": self.unequal,
            "kernels": None if self.kernels is None else asdict(self.kernels),
            "cross_check": self.cross_check and {"node": self.cross_check[0], **asdict(self.cross_check[1])},
            "sites": {m: {k: vars(t) for k, t in self.sites[m].items()} for m in _MODES},
        }
