"""What verify counts: the integer differences at every site, and the noise at the outputs; and its limits.

From end to end, ties and the order of sums move single integers, and a deep network amplifies them, so the
outputs of graph and runtime differ although no op is wrong. Both differ from float by the noise of
quantization anyway. A file is as good as its graph if its noise is no larger and its predictions equal
float's as often: the runtime must come as close to float as the graph does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from qtrace.comparing.groups import ColumnGroup
from qtrace.comparing.selections import SelectedShares, Share
from qtrace.comparing.sums import (
    EQUAL_DB,
    NO_INFORMATION_DB,
    ErrorSums,
    add_fields,
    decibels,
    finite_or_none,
    inner,
    sqnr_db,
)
from qtrace.errors import ExportError, GraphError
from qtrace.onnxfile.kernels import Kernels
from qtrace.verification.selections import Shape, describe_rows

# Of integers of 16 bits: kernels multiply by numbers of 15 bits, so that the last of 65,536 steps is off here
# and there (TensorFlow Lite, "16x8 quantization"); it is worth 1/256 of a step of 8 bits.
_WIDE_EQUAL = 0.9
# Of means that a kernel rounds with ties away from zero: every second mean of two integers is a tie, and
# every second tie goes the other way than to the even integer.
_INEXACT_EQUAL = 0.7
MODES = ("op_by_op", "end_to_end", "deployed")


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
        counts = _count_steps(graph, runtime)
        different = sum(counts.values())
        self.values += graph.size
        self.equal += graph.size - different
        for step, number in counts.items():
            self.histogram[step] = self.histogram.get(step, 0) + number
        worst = max(map(abs, counts), default=0)
        self.worst = max(self.worst, worst)
        return worst


def _count_steps(graph: np.ndarray, runtime: np.ndarray) -> dict[int, int]:
    """Counts each difference of two arrays of integers, without 0."""
    differs = runtime != graph
    if not differs.any():
        return {}
    differences = np.subtract(runtime[differs], graph[differs], dtype=np.int64)
    steps, counts = np.unique(differences, return_counts=True)
    return dict(zip(steps.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True)
class CrossCheck:
    """The outcome of a second evaluation of an op whose values differ between graph and runtime.

    Attributes:
        side: the side that is wrong: "graph" (a kernel of MegEngine), "runtime" (the exported file, or a
            kernel of the runtime), "float" (the runtime, in the float network, too), or "unknown".
        reason: the evidence, as a clause.
    """

    side: Literal["graph", "runtime", "float", "unknown"]
    reason: str

    def sentence(self) -> str:
        """Returns the verdict and its evidence as one sentence."""
        return f"{_SIDES[self.side]}: {self.reason}"


_SIDES = {
    "graph": "the graph is wrong, not the file",
    "runtime": "the file or the runtime is wrong, not the graph",
    "float": "the runtime is wrong, not the file",
    "unknown": "either side may be wrong",
}


@dataclass
class Tallies:
    """What ``qtrace.verify`` counts, and whether it keeps within the limits.

    The modes: ``op_by_op`` computes each op from the runtime's own integers, optimizations off;
    ``end_to_end`` computes both sides from the same input, optimizations off; ``deployed`` does so with
    all optimizations.

    Attributes:
        path: the file.
        max_lsb: largest difference allowed op by op.
        min_equal: smallest share of equal values allowed op by op.
        min_sqnr_db: smallest ratio allowed at each output computed from the runtime's own integers, in dB.
        sites: mode -> node -> tally.
        outputs: mode -> column group of an output -> its noise; "op_by_op" starts at the runtime's own
            integers, so it shows whether both sides compute alike what follows the last site, in float.
        kernels: which ops the runtime computes on integers when it is deployed; None where that is unknown.
        unknown_processor: whether the file is for no runtime in particular, and its products saturate on some
            processors, whatever the one is that verify runs on.
        cross_check: the first node that differs by more than is allowed, op by op, and the second evaluation
            that says which side is wrong there; None where no node does.
        end_to_end_db: smallest ratio of the runtime's outputs to the graph's allowed end to end, in dB; None
            for none: then both are compared to float.
        float_source: what computes the float outputs, in words; "" where there are none.
        closeness: mode -> column group of an output -> the distances of graph and runtime to float.
        optimized: node -> tally, op by op with all optimizations; of the batches in which the outputs of the
            optimized form are so far from the graph's that ties could hide a wrong kernel.
        selections: node or output with a number of rows that depends on values -> the op that selects them.
        unequal: mode -> site or output -> its shapes in graph and runtime, for each batch that is not
            compared because such an op selects other rows, or the same rows in another order.
        rankings: node or output that depends on positions of ranked scores -> the op that ranks them.
        reordered: mode -> site or output -> in how many batches it is not compared because graph and runtime
            rank equal scores in another order.
        wide: the sites with more than 8 bits; of their values 90 % must be equal, and all within ``max_lsb``.
        inexact: the sites whose kernels do not round ties as the graph does, or after a kept node of
            an imported file; 70 % of their values must be equal, and all within ``max_lsb``.
        groups: the column groups of the outputs; () for each output as a whole.
        side: versions and machine of a runtime on another host; empty for one in this interpreter.
        client: what a client has to do so that it computes the same; "" for nothing.
        runtime: that the file ran in the runtime of its backend, or which one stood in for that; "" where the
            runtime is the usual one or was named.
        selected: how many of the rows that the graph selects are float's; None where nothing selects.
        runtime_selected: mode -> how many of the rows that the runtime selects are float's.
        float16: the number of ops that the file has in float16. Op by op, an integer after them counts as
            the graph's if float16 explains the difference of what is rounded.
    """

    path: str
    max_lsb: int
    min_equal: float
    min_sqnr_db: float
    sites: dict[str, dict[str, DifferenceTally]] = field(default_factory=lambda: {m: {} for m in MODES})
    outputs: dict[str, dict[str, ErrorSums]] = field(default_factory=dict)
    kernels: Kernels | None = None
    unknown_processor: bool = False
    cross_check: tuple[str, CrossCheck] | None = None
    end_to_end_db: float | None = None
    float_source: str = ""
    closeness: dict[str, dict[str, Closeness]] = field(default_factory=dict)
    optimized: dict[str, DifferenceTally] = field(default_factory=dict)
    selections: Mapping[str, str] = field(default_factory=dict)
    unequal: dict[str, dict[str, list[tuple[Shape, Shape]]]] = field(default_factory=dict)
    rankings: Mapping[str, str] = field(default_factory=dict)
    reordered: dict[str, dict[str, int]] = field(default_factory=dict)
    wide: Collection[str] = frozenset()
    inexact: Collection[str] = frozenset()
    groups: tuple[ColumnGroup, ...] = ()
    side: Mapping[str, Any] = field(default_factory=dict)
    client: str = ""
    runtime: str = ""
    selected: SelectedShares | None = None
    runtime_selected: dict[str, SelectedShares] = field(default_factory=dict)
    float16: int = 0

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
        ranked: Collection[str] = (),
    ) -> None:
        """Adds the model's outputs of one batch.

        Args:
            mode: the comparison.
            names: the names of the outputs.
            graph: the graph's outputs.
            runtime: the runtime's outputs; None for one that a device did not dump.
            selected: outputs whose rows depend on values; below the limit they are not compared, since both
                sides may have selected other rows.
            ranked: outputs that depend on the order of equal scores; compared likewise.

        Raises:
            ExportError: when their number differs, or a shape that does not depend on values.
        """
        if len(graph) != len(runtime):
            raise ExportError(
                f"{self.path}: the number of outputs is {len(runtime)}, but {len(graph)} in the graph: "
                "export it again."
            )
        noises = self.outputs.setdefault(mode, {})
        for index, (name, a, b) in enumerate(zip(names, graph, runtime, strict=True)):
            if b is None or not self.compares(mode, f"output {name}", a, b):
                continue
            if name in {*selected, *ranked} and sqnr_db(*at_same_precision(a, b)) < self.min_sqnr_db:
                if name in selected:
                    self.note_rows(mode, f"output {name}", a, b)
                else:
                    self.note_order(mode, f"output {name}")
                continue
            for group in self.groups_of(index, name, a):
                sums = noises.setdefault(group.name, ErrorSums())
                sums.add(*at_same_precision(group.select(a), group.select(b)), classes=True)

    def groups_of(self, index: int, name: str, value: np.ndarray) -> list[ColumnGroup]:
        """Returns the column groups of an output: the whole of it where there are none.

        Args:
            index: the place of the output.
            name: its name.
            value: its value in one batch.
        """
        groups = [group for group in self.groups if group.output == index and group.fits(value)]
        return groups or [ColumnGroup(index, name)]

    def add_closeness(
        self,
        mode: str,
        names: Sequence[str],
        exact: Sequence[np.ndarray],
        graph: Sequence[np.ndarray],
        runtime: Sequence[np.ndarray],
        replayed: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Adds the outputs of one batch next to float's, which has the same rows as either side selects.

        Leaves out those whose rows depend on values, and what is ranked where equal scores come in another
        order in the runtime.

        Args:
            mode: the comparison.
            names: the names of the outputs.
            exact: float's outputs, with what the graph selects.
            graph: the graph's outputs.
            runtime: the runtime's outputs.
            replayed: float's outputs, with what the runtime selects; None for `exact`.

        Raises:
            GraphError: when an output has another shape in the float network.
        """
        sums = self.closeness.setdefault(mode, {})
        values = zip(names, exact, graph, runtime, replayed or exact, strict=True)
        for index, (name, f, a, b, g) in enumerate(values):
            if b is None or name in self.selections or (name in self.rankings and self.reordered):
                continue
            if f.shape != a.shape:
                raise GraphError(
                    f"output {name} has shape {f.shape} in the float network and {a.shape} in the graph: "
                    "give the network that was quantized."
                )
            for group in self.groups_of(index, name, f):
                pair = at_same_precision(group.select(a), group.select(b))
                sums.setdefault(group.name, Closeness()).add(group.select(f), *pair, group.select(g))

    def add_selected(self, mode: str, shares: Sequence[Share]) -> None:
        """Adds how many of the rows that the runtime selects in one batch are float's."""
        if self.selected is not None:
            self.runtime_selected.setdefault(mode, self.selected.empty()).add(shares)

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

    def note_order(self, mode: str, tensor: str) -> None:
        """Records a tensor that differs as the order of equal scores differs."""
        counts = self.reordered.setdefault(mode, {})
        counts[tensor] = counts.get(tensor, 0) + 1

    def worst_lsb(self, mode: str = "op_by_op") -> int:
        """Returns the largest difference at any site, in LSB."""
        return max((t.worst for t in self.sites[mode].values()), default=0)

    def equal_share(self, mode: str = "op_by_op") -> float:
        """Returns the share of equal integers over all sites."""
        values = sum(t.values for t in self.sites[mode].values())
        return sum(t.equal for t in self.sites[mode].values()) / values if values else 1.0

    def least_equal(self, node: str) -> float:
        """Returns the smallest share of equal values allowed at a site."""
        loose = _INEXACT_EQUAL if node in self.inexact else 1.0
        return min(self.min_equal, _WIDE_EQUAL if node in self.wide else 1.0, loose)

    def short_shares(self) -> list[tuple[float, float, str]]:
        """Returns the share of equal integers op by op, its limit, and which integers, where it is too small.

        A share is too small if chance does not explain it, as one tie in 500 values. Integers of more than
        8 bits are counted by themselves, and so are those whose ties go another way.
        """
        sites = self.sites["op_by_op"]
        inexact = [n for n in sites if n in self.inexact and n not in self.wide]
        sides = (
            ("", [n for n in sites if n not in self.wide and n not in self.inexact]),
            (" of 16 bits", [n for n in sites if n in self.wide]),
            (" of kernels that round another way", inexact),
        )
        short = []
        for words, names in sides:
            values = sum(sites[name].values for name in names)
            equal = sum(sites[name].equal for name in names)
            limit = min(map(self.least_equal, names), default=0.0)
            if too_many(values - equal, values, limit):
                short.append((equal / values, limit, words))
        return short

    def histogram(self, mode: str = "op_by_op") -> dict[int, int]:
        """Counts each difference (runtime minus graph, in LSB, without 0) over all sites, in order."""
        counts: dict[int, int] = {}
        for tally in self.sites[mode].values():
            for step, count in tally.histogram.items():
                counts[step] = counts.get(step, 0) + count
        return dict(sorted(counts.items()))

    def sqnr_db(self, mode: str = "reference") -> float:
        """Returns the signal-to-noise ratio of the worst column group of the runtime's outputs, in dB."""
        return self.weakest_output(mode)[1] if self.outputs[mode] else math.inf

    def weakest_output(self, mode: str = "reference") -> tuple[str, float]:
        """Returns the column group with the lowest signal-to-noise ratio, and that ratio in dB.

        A group of columns that the graph loses, all 0, is without a ratio; its distance to float is measured.
        """
        noises = self.outputs[mode]
        columns = {group.name for group in self.groups if not group.whole}
        alive = {n: s for n, s in noises.items() if s.signal > 0 or n not in columns} or noises
        name = min(alive, key=lambda n: alive[n].sqnr_db)
        return name, alive[name].sqnr_db

    def lost_groups(self) -> dict[str, float]:
        """Returns the column groups of which the graph keeps no information -> their ratio to float in dB."""
        sums = next(iter(self.closeness.values()), {})
        return {
            name: s.graph_db for name, s in sums.items() if s.signal > 0 and s.graph_db < NO_INFORMATION_DB
        }

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
        problems += [
            f"{share:.4%} of the integers{words} are equal, {limit:.4%} needed"
            for share, limit, words in self.short_shares()
        ]
        origin = ", from the runtime's own integers," if self.sites["op_by_op"] else ""
        problems += [
            f"output {name}{origin} has {noise.sqnr_db:.1f} dB, {self.min_sqnr_db:.1f} dB needed"
            for name, noise in self.outputs.get("op_by_op", {}).items()
            if noise.sqnr_db < self.min_sqnr_db
        ]
        for mode in self.end_modes():
            problems += self._mode_problems(mode)
        for tensor, shapes in itertools.islice(self.unequal.get("op_by_op", {}).items(), 1):
            problems.append(f"{describe_rows(tensor, shapes)}, from the same integers: it cannot be compared")
        if (worst := self.optimization_lsb()) is not None:
            problems.append(
                "sites (deployed) differ by {1} LSB, by {0} LSB without optimizations".format(*worst)
            )
        return problems

    def _mode_problems(self, mode: str) -> list[str]:
        """Lists what is wrong with the outputs of one comparison from end to end."""
        problems = []
        limit, ratio = self.end_to_end_db, self.sqnr_db(mode)
        if limit is not None and ratio < limit:
            name = f" at {self.weakest_output(mode)[0]}" if len(self.outputs[mode]) > 1 else ""
            problems.append(f"outputs ({mode}) have {ratio:.1f} dB{name}, {limit:.1f} dB needed")
        elif math.isinf(self._total(mode).noise):
            problems.append(f"outputs ({mode}) are not finite on one side")
        wrong = {n: t for n, t in self.optimized.items() if mode == "deployed" and t.worst > self.max_lsb}
        for node, tally in itertools.islice(wrong.items(), 1):
            problems.append(
                f"site {node} differs by {tally.worst} LSB with the runtime's optimizations, {self.max_lsb} "
                "allowed"
            )
        if self.selected is not None and mode in self.runtime_selected:
            problems += fewer_rows(self.selected, self.runtime_selected[mode], mode)
        for name, closeness in self.closeness.get(mode, {}).items():
            problems += [f"output {name} ({mode}) {problem}" for problem in closeness.problems()]
        return problems

    def failing_modes(self) -> list[str]:
        """Returns the comparisons from end to end whose outputs make the file fail."""
        return [mode for mode in self.end_modes() if self._mode_problems(mode)]

    def end_modes(self) -> list[str]:
        """Returns the comparisons from end to end: "reference" without optimizations, and "deployed"."""
        return [mode for mode in self.outputs if mode != "op_by_op"]

    def optimization_lsb(self) -> tuple[int, int] | None:
        """Returns the largest differences before selections, plain and optimized, if the latter is larger.

        Outputs that are not compared cannot show that an optimization of the runtime is wrong.
        """
        plain, fused = (
            max((t.worst for n, t in self.sites[mode].items() if n not in self.selections), default=0)
            for mode in MODES[1:]
        )
        return (plain, fused) if "deployed" in self.unequal and fused > plain + self.max_lsb else None


def too_many(differing: int, values: int, least_equal: float) -> bool:
    """Returns whether more values differ than a share of equal ones allows, and than chance explains.

    Args:
        differing: the number of values that differ.
        values: the number of values.
        least_equal: the smallest share of equal values allowed.
    """
    allowed = values * (1 - least_equal)
    return more_than_chance(differing - allowed, allowed)


def at_same_precision(graph: np.ndarray, runtime: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a column group on both sides as float32, rounded to float16 if the runtime returns it so.

    Between 0 and 1, where probabilities are, values are equal up to two steps of float32 at 1. Runtimes such
    as onnxruntime compute a Sigmoid no more exactly, however small its value is.

    Args:
        graph: the graph's value.
        runtime: the runtime's value.
    """
    if runtime.dtype == np.float16:
        with np.errstate(over="ignore"):
            graph, runtime = graph.astype(np.float16).astype(np.float32), runtime.astype(np.float32)
    if graph.dtype.kind == "f" and graph.size and graph.min() >= 0 and graph.max() <= 1:
        runtime = np.where(np.abs(runtime - graph) <= 2 * np.finfo(np.float32).eps, graph, runtime)
    return graph, runtime


# How much more noise than the graph the runtime may have.
_MAX_LOSS_DB = 1.0
# What chance explains, in standard deviations.
_DEVIATIONS = 2.0


@dataclass
class Closeness:
    """The distances between float, graph and runtime at one column group, in sums over all batches.

    Predictions are the indices of the largest scores, or the values of an output of integers.

    Attributes:
        signal: the sum of the squares of float's values.
        graph: the sum of the squares of graph minus float.
        runtime: the sum of the squares of runtime minus float.
        difference: the sum of the squares of runtime minus graph.
        spread: the sum of the squares of what each value adds to `runtime` minus `graph`.
        predictions: the number of predictions.
        graph_agreeing: the number of the graph's predictions that are float's.
        runtime_agreeing: the number of the runtime's predictions that are float's.
        discordant: the number of predictions that are float's on only one of both sides.
    """

    signal: float = 0.0
    graph: float = 0.0
    runtime: float = 0.0
    difference: float = 0.0
    spread: float = 0.0
    predictions: int = 0
    graph_agreeing: int = 0
    runtime_agreeing: int = 0
    discordant: int = 0

    def add(
        self, exact: np.ndarray, graph: np.ndarray, runtime: np.ndarray, replayed: np.ndarray | None = None
    ) -> None:
        """Adds the values of one batch, arrays of one shape; values that are not finite are left out.

        Args:
            exact: float's values.
            graph: the graph's values.
            runtime: the runtime's values.
            replayed: float's values for what the runtime selects, if it selects otherwise than the graph.
        """
        replayed = exact if replayed is None else replayed
        integers = exact.dtype.kind != "f"
        if integers or _looks_like_scores(exact):
            values = (exact, graph, runtime, replayed)
            self._add_predictions(*(v if integers else v.argmax(axis=-1) for v in values))
        if integers:
            return
        f, a, b, g = (v.astype(np.float64).ravel() for v in (exact, graph, runtime, replayed))
        finite = np.isfinite(f) & np.isfinite(a) & np.isfinite(b) & np.isfinite(g)
        f, a, b, g = f[finite], a[finite], b[finite], g[finite]
        by_graph, by_runtime = np.square(a - f), np.square(b - g)
        self.signal += inner(f, f)
        self.graph += float(by_graph.sum())
        self.runtime += float(by_runtime.sum())
        self.difference += float(np.square(b - a).sum())
        self.spread += float(np.square(by_runtime - by_graph).sum())

    def _add_predictions(
        self, exact: np.ndarray, graph: np.ndarray, runtime: np.ndarray, replayed: np.ndarray
    ) -> None:
        by_graph, by_runtime = graph == exact, runtime == replayed
        self.predictions += exact.size
        self.graph_agreeing += int(by_graph.sum())
        self.runtime_agreeing += int(by_runtime.sum())
        self.discordant += int((by_graph != by_runtime).sum())

    @property
    def graph_db(self) -> float:
        """The signal-to-noise ratio of the graph to float, in dB."""
        return decibels(self.signal, self.graph)

    @property
    def runtime_db(self) -> float:
        """The signal-to-noise ratio of the runtime to float, in dB."""
        return decibels(self.signal, self.runtime)

    def problems(self) -> Iterator[str]:
        """Yields in what the runtime is worse than the graph, by more than chance explains, as clauses."""
        allowed = self.graph * 10.0 ** (_MAX_LOSS_DB / 10.0) + _DEVIATIONS * math.sqrt(self.spread)
        if self.runtime > allowed and decibels(self.signal, self.difference) < EQUAL_DB:
            yield (
                f"is {self.runtime_db:.1f} dB from float in the runtime and {self.graph_db:.1f} dB in the "
                f"graph, {_MAX_LOSS_DB:.1f} dB less allowed"
            )
        # McNemar 1947, "Note on the sampling error of the difference between correlated proportions": were
        # both equally good, either side would have half of the discordant predictions.
        lost = self.graph_agreeing - self.runtime_agreeing
        if more_than_chance(lost, self.discordant):
            yield (
                f"has float's prediction {self.runtime_agreeing} times in the runtime and "
                f"{self.graph_agreeing} times in the graph, of {self.predictions}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the ratios in dB and the counts of predictions."""
        return {
            "graph_db": finite_or_none(self.graph_db),
            "runtime_db": finite_or_none(self.runtime_db),
            "predictions": self.predictions,
            "graph_agreeing": self.graph_agreeing,
            "runtime_agreeing": self.runtime_agreeing,
        }


def is_as_wrong(float_db: float, file_db: float) -> bool:
    """Returns whether a runtime computes a float network wrong, and by as much as a file of the network.

    Args:
        float_db: the ratio of the runtime's float outputs to another engine's.
        file_db: the ratio of the file's outputs in the runtime to the graph's.
    """
    return float_db < EQUAL_DB and float_db <= file_db + _MAX_LOSS_DB


def more_than_chance(count: float, variance: float) -> bool:
    """Returns whether a count is larger than chance explains.

    Args:
        count: how much larger the count is than expected.
        variance: its variance; 0 where nothing happens by chance.
    """
    return count > (1 + _DEVIATIONS * math.sqrt(variance) if variance else 0)


def sum_up(outputs: Iterable[Closeness]) -> Closeness:
    """Returns the sums over several outputs, each of which keeps its own power."""
    return add_fields(Closeness, outputs)


def fewer_rows(graph: SelectedShares, runtime: SelectedShares, mode: str) -> Iterator[str]:
    """Yields where the runtime selects fewer of float's rows than the graph, by more than chance explains.

    Rows that float does not select are not compared, so a runtime that selects nothing else would be exact.

    Args:
        graph: how many of the rows that the graph selects are float's.
        runtime: the same of the runtime.
        mode: the comparison, for the text.
    """
    for number in sorted(frozenset().union(*graph.reaching)):
        sides = zip(graph.counts(number), runtime.counts(number), strict=True)
        for (by_graph, of_graph), (by_runtime, of_runtime) in reversed(list(sides)):  # clear places first
            # Discordant rows are wrong on one side at least.
            discordant = (of_graph - by_graph) + (of_runtime - by_runtime)
            if more_than_chance(by_graph - by_runtime, discordant):
                yield (
                    f"{graph.names[number]} ({mode}) selects {by_runtime} of float's rows in the runtime and "
                    f"{by_graph} in the graph, of {of_runtime}"
                )
                break


def _looks_like_scores(exact: np.ndarray) -> bool:
    """Returns whether the last axis has scores of classes: of samples x classes, or probabilities."""
    if exact.ndim < 2 or not exact.size or exact.shape[-1] < 2:
        return False
    return exact.ndim == 2 or bool((exact >= 0).all() and np.allclose(exact.sum(axis=-1), 1.0, atol=1e-3))
