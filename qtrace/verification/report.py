"""What verify found: a tally of integer differences for every site, and the noise at the outputs."""

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

__all__ = ["CrossCheck", "SiteTally", "VerifyReport"]

_MODES = ("op_by_op", "end_to_end", "deployed")
_SHOWN = 6


@dataclass
class SiteTally:
    """Differences at one site: how many values, how many equal, the largest difference in LSB.

    ``histogram`` has every difference but 0, runtime minus graph in LSB, and how often it occurs.
    """

    values: int = 0
    equal: int = 0
    worst: int = 0
    histogram: dict[int, int] = field(default_factory=dict)

    def add(self, mine: np.ndarray, theirs: np.ndarray) -> int:
        """Adds one comparison of integers of equal shape; returns the largest difference in it."""
        difference = theirs.astype(np.int64) - mine.astype(np.int64)
        apart = difference[difference != 0]
        worst = int(np.abs(apart).max(initial=0))
        self.values += difference.size
        self.equal += difference.size - apart.size
        self.worst = max(self.worst, worst)
        for step, count in zip(*np.unique(apart, return_counts=True), strict=True):
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
        """The verdict and its evidence."""
        return f"{_SIDES[self.side]}: {self.reason}"


_SIDES = {
    "graph": "the graph is wrong, not the file",
    "runtime": "the file or the runtime is wrong, not the graph",
    "unknown": "either side may be wrong",
}


@dataclass
class VerifyReport:
    """The outcome of ``qtrace.verify``.

    ``op_by_op``: each op computed from the runtime's own integers, optimizations off. ``end_to_end``: both
    from the same input, optimizations off. ``deployed``: the same with all optimizations.

    Attributes:
        path: the file.
        max_lsb: largest difference allowed op by op.
        min_equal: smallest share of equal values allowed op by op.
        min_sqnr_db: smallest ratio allowed at the outputs, in dB.
        sites: mode -> node -> tally.
        outputs: mode -> output -> its noise; "op_by_op" is from the runtime's own integers to the output, so
            it tells whether what follows the last site, in float, is computed alike.
        kernels: which ops the runtime computes on integers when it is deployed; None where that is unknown.
        cross_check: the first node that differs by more than is allowed, op by op, and the second evaluation
            that says which side is wrong there; None where no node does.
        selections: node or output with a number of rows that depends on values -> the op that selects them.
        unequal: mode -> site or output -> its shapes in graph and runtime, in each batch where such an op
            selects other rows, or the same in another order; they are not compared there.
    """

    path: str
    max_lsb: int
    min_equal: float
    min_sqnr_db: float
    sites: dict[str, dict[str, SiteTally]] = field(default_factory=lambda: {m: {} for m in _MODES})
    outputs: dict[str, dict[str, ErrorSums]] = field(default_factory=dict)
    kernels: Kernels | None = None
    cross_check: tuple[str, CrossCheck] | None = None
    selections: Mapping[str, str] = field(default_factory=dict)
    unequal: dict[str, dict[str, list[tuple[Shape, Shape]]]] = field(default_factory=dict)

    def add(self, mode: str, node: str, mine: np.ndarray, theirs: np.ndarray) -> int:
        """Adds the integers of one site in one batch; returns their largest difference, 0 for other rows.

        Raises:
            ExportError: when the two have different shapes that do not depend on values.
        """
        if not self.compares(mode, f"site {node}", mine, theirs):
            return 0
        return self.sites[mode].setdefault(node, SiteTally()).add(mine, theirs)

    def add_outputs(
        self,
        mode: str,
        names: Sequence[str],
        mine: Sequence[np.ndarray],
        theirs: Sequence[np.ndarray],
        selected: Collection[str] = (),
    ) -> None:
        """Adds the model's outputs of one batch.

        Args:
            mode: the comparison.
            names: the names of the outputs.
            mine: the graph's outputs.
            theirs: the runtime's outputs.
            selected: outputs whose rows depend on values: they are left out below the limit, for both sides
                may have selected other rows.

        Raises:
            ExportError: when their number differs, or a shape that does not depend on values.
        """
        if len(mine) != len(theirs):
            raise ExportError(
                f"{self.path}: the number of outputs is {len(theirs)}, but {len(mine)} in the graph: "
                "export it again."
            )
        noises = self.outputs.setdefault(mode, {})
        for name, a, b in zip(names, mine, theirs, strict=True):
            if not self.compares(mode, f"output {name}", a, b):
                continue
            if name in selected and sqnr_db(a, b) < self.min_sqnr_db:
                self.note_rows(mode, f"output {name}", a, b)
            else:
                noises.setdefault(name, ErrorSums()).add(a, b, classes=True)

    def compares(self, mode: str, what: str, mine: np.ndarray, theirs: np.ndarray) -> bool:
        """Returns whether values can be compared; takes note of numbers of rows that depend on values.

        Args:
            mode: the comparison.
            what: "site" or "output" and its name.
            mine: the graph's values.
            theirs: the runtime's values.

        Raises:
            ExportError: when they have different shapes that do not depend on values.
        """
        if mine.shape == theirs.shape:
            return True
        if what.partition(" ")[2] not in self.selections or mine.ndim != theirs.ndim:
            raise ExportError(
                f"{self.path}: {what} has shape {theirs.shape} in the runtime, but {mine.shape} in the "
                "graph: export it again."
            )
        self.note_rows(mode, what, mine, theirs)
        return False

    def note_rows(self, mode: str, what: str, mine: np.ndarray, theirs: np.ndarray) -> None:
        """Takes note of a tensor of which graph and runtime have other rows, in number or in kind."""
        self.unequal.setdefault(mode, {}).setdefault(what, []).append((mine.shape, theirs.shape))

    def worst_lsb(self, mode: str = "op_by_op") -> int:
        """The largest difference at any site."""
        return max((t.worst for t in self.sites[mode].values()), default=0)

    def equal_share(self, mode: str = "op_by_op") -> float:
        """The share of equal integers over all sites."""
        values = sum(t.values for t in self.sites[mode].values())
        return sum(t.equal for t in self.sites[mode].values()) / values if values else 1.0

    def histogram(self, mode: str = "op_by_op") -> dict[int, int]:
        """Difference (runtime minus graph) in LSB -> how often, over all sites, in order; without 0."""
        found: dict[int, int] = {}
        for tally in self.sites[mode].values():
            for step, count in tally.histogram.items():
                found[step] = found.get(step, 0) + count
        return dict(sorted(found.items()))

    def sqnr_db(self, mode: str = "reference") -> float:
        """Signal-to-noise ratio of the runtime's outputs together against the graph's, in dB."""
        return self._whole(mode).sqnr_db

    def weakest_output(self, mode: str = "reference") -> tuple[str, float]:
        """The output with the lowest ratio of its own, and that ratio in dB."""
        name = min(self.outputs[mode], key=lambda n: self.outputs[mode][n].sqnr_db)
        return name, self.outputs[mode][name].sqnr_db

    def agreement(self, mode: str = "deployed") -> float:
        """The share of samples whose largest output has the same index in the graph and the runtime."""
        share = self._whole(mode if mode in self.outputs else "reference").agreement
        return 1.0 if share is None else share

    def _whole(self, mode: str) -> ErrorSums:
        return sum(self.outputs[mode].values(), ErrorSums())

    @property
    def passed(self) -> bool:
        """Whether every tolerance holds."""
        return not self.problems()

    def problems(self) -> list[str]:
        """What does not hold, a line each."""
        found = []
        if self.worst_lsb() > self.max_lsb:
            node = max(self.sites["op_by_op"], key=lambda n: self.sites["op_by_op"][n].worst)
            found.append(f"site {node} differs by {self.worst_lsb()} LSB, {self.max_lsb} allowed")
        if self.equal_share() < self.min_equal:
            found.append(f"{self.equal_share():.4%} of the integers are equal, {self.min_equal:.4%} needed")
        found += [
            f"output {name}, from the runtime's own integers, has {noise.sqnr_db:.1f} dB, "
            f"{self.min_sqnr_db:.1f} dB needed"
            for name, noise in self.outputs.get("op_by_op", {}).items()
            if noise.sqnr_db < self.min_sqnr_db
        ]
        found += [
            f"outputs ({mode}) have {self.sqnr_db(mode):.1f} dB, {self.min_sqnr_db:.1f} dB needed"
            for mode in self.outputs
            if mode != "op_by_op" and self.sqnr_db(mode) < self.min_sqnr_db
        ]
        for what, shapes in itertools.islice(self.unequal.get("op_by_op", {}).items(), 1):
            found.append(f"{describe_rows(what, shapes)}, from the same integers: it cannot be compared")
        if (worst := self._optimization_lsb()) is not None:
            found.append(
                "sites (deployed) differ by {1} LSB, by {0} LSB without optimizations".format(*worst)
            )
        return found

    def table(self, max_width: int = 140) -> str:
        """A text table: a row for each site, then the totals."""
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
        """The totals and the verdict, in a few lines."""
        ratios = ", ".join(self._ratio(mode) for mode in self.outputs if mode != "op_by_op")
        lines = [
            f"op by op: worst {self.worst_lsb()} LSB, {self.equal_share():.4%} equal "
            f"over {len(self.sites['op_by_op'])} sites{self._differences()}",
            f"outputs: {ratios}; same prediction {self.agreement():.2%}",
            *self._kernel_lines(),
            "passed" if self.passed else "FAILED: " + "; ".join(self.problems()),
            *self.remarks(),
        ]
        return "\n".join(lines)

    def remarks(self) -> list[str]:
        """What the problems mean, who is to blame and what to do, a sentence each."""
        if self.passed:
            return self._rows()
        if self.cross_check is not None:
            node, check = self.cross_check
            return [f"at {node}, {check.sentence()}"]
        floats = self.outputs.get("op_by_op", {}).values()
        if self.worst_lsb() > self.max_lsb or any(noise.sqnr_db < self.min_sqnr_db for noise in floats):
            return []
        if self.unequal and self._optimization_lsb() is None:
            return self._rows()
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
        """The largest difference before selections without and with optimizations, if these make it larger.

        Outputs that are left out cannot show that an optimization of the runtime is wrong.
        """
        plain, fused = (
            max((t.worst for n, t in self.sites[mode].items() if n not in self.selections), default=0)
            for mode in _MODES[1:]
        )
        return (plain, fused) if "deployed" in self.unequal and fused > plain + self.max_lsb else None

    def _rows(self) -> list[str]:
        """What it means that graph and runtime select other rows, a sentence each."""
        if not self.unequal:
            return []
        mode, tensors = next((m, self.unequal[m]) for m in (*_MODES, "reference") if m in self.unequal)
        what, shapes = next(iter(tensors.items()))
        origin = self.selections[what.partition(" ")[2]]
        others = f", so have {len(tensors) - 1} more behind it" if len(tensors) > 1 else ""
        within = f"no op that was compared differs by more than {self.max_lsb} LSB op by op"
        cure = (
            "what to do: measure the accuracy of the task with the file; the layers before the selection can "
            "be verified alone (qtrace.prepare with outputs=)"
        )
        if mode == "op_by_op":
            cause = "both read the same integers, but decide values next to a threshold, or ties, otherwise"
        else:
            sites = self.sites["end_to_end"].items()
            first = next((f", first {n} by {t.worst} LSB" for n, t in sites if t.equal < t.values), "")
            cause = f"from end to end integers differ{first}, and one LSB moves values over a threshold"
            cure = f"this is no fault of the file; {cure}"
        return [
            f"{describe_rows(what, shapes)}{others}: its rows depend on values, which {origin} selects",
            f"{within}; {cause}; these rows are not compared",
            cure,
        ]

    def _next_limit(self) -> float:
        """A limit in dB that the outputs meet, a multiple of 5."""
        lowest = min(self.sqnr_db(mode) for mode in self.outputs if mode != "op_by_op")
        return 5.0 * float(np.floor(lowest / 5.0)) if np.isfinite(lowest) else 0.0

    def _ratio(self, mode: str) -> str:
        if not self.outputs[mode]:
            return f"{mode} not compared"
        whole, (name, own) = self.sqnr_db(mode), self.weakest_output(mode)
        lowest = f" ({name} alone {own:.1f})" if f"{own:.1f}" != f"{whole:.1f}" else ""
        return f"{mode} {whole:.1f} dB{lowest}"

    def _differences(self) -> str:
        """The most frequent differences, in a few words."""
        found = sorted(self.histogram().items(), key=lambda item: -item[1])
        shown = ", ".join(f"{step:+d} LSB x {count}" for step, count in found[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f" ({shown}{more})" if found else ""

    def _kernel_lines(self) -> list[str]:
        """How many ops run on integers, and what keeps the others from it."""
        if self.kernels is None:
            return []
        count = len(self.kernels.integer) + len(self.kernels.floats)
        lines = [
            f"integer kernels: {len(self.kernels.integer)} of {count} ops of the file that read integers"
            + ("; the others compute in float, with the same values" if self.kernels.floats else "")
        ]
        groups: dict[tuple[str, str], list[str]] = {}
        for name, op, why in self.kernels.floats:
            groups.setdefault((op, why), []).append(name)
        for (op, why), names in groups.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  in float: {op} {', '.join(names[:3])}{more}: {why}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
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
