"""The verdict on a quantized graph, with the limits of its words."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from qtrace.display import Displayed
from qtrace.metrics import decibels
from qtrace.outputs import NO_INFORMATION_DB, GroupFigures
from qtrace.outputs.counted import DIFFERING_MARGIN_DB

__all__ = [
    "BROKEN_BELOW_DB",
    "DIFFERING_DB",
    "FAKE_QUANTS",
    "GOOD_EQUAL",
    "GOOD_FROM_DB",
    "THE_FILE",
    "GroupVerdict",
    "Verdict",
    "judge",
]

GOOD_FROM_DB = 20.0
"""From this SQNR of the worst column group on, a graph is called good: noise is at most 1 % of the signal."""
BROKEN_BELOW_DB = 10.0
"""Below this SQNR a graph is called broken: the noise is more than 10 % of the signal."""
DIFFERING_DB = GOOD_FROM_DB - DIFFERING_MARGIN_DB
"""Below this SQNR of what differs between samples a graph is not called good: noise is 5 % of that."""
FAKE_QUANTS = "graph with fake quants"
"""What computes the figures that are no runtime's."""
THE_FILE = "the file"
"""What computes the figures of a finished file, in its runtime."""
GOOD_EQUAL = 0.9
"""From this share of equal integers on, a graph is good; an index is right or wrong."""
_BROKEN_EQUAL = 0.5
_NEARLY_ALL = 0.999  # the largest share below 100.0 %
_GOOD_SAME, _FEW_CHANGED = 0.9, 2  # share of equal predictions; fewer changed ones tell of no share
_GOOD_LOSS = 0.01  # of the metric in float
_BROKEN_LOSS = 0.05
_WORDS = ("broken", "check", "good")
_NOTABLE_DB = 3.0  # that a file has less than the graph, on other samples
_PLENTY_DB = 40.0  # of which nobody needs to know the difference


@dataclass(frozen=True)
class GroupVerdict:
    """How good one column group of an output is.

    Attributes:
        name: the output and the columns, in words.
        output: the place of the output among the graph's outputs.
        axis: the axis along which columns count; None for the whole output.
        columns: the columns as half-open runs; () for the whole output.
        sqnr_db: the SQNR of the group in dB.
        variation_db: the ratio of the variation within columns to that of the error, in dB: what is left of
            values that lie close together and far from 0.
        informative: whether the values tell anything of float's: they vary where float's do, and noise is
            less than half of the signal.
    """

    name: str
    output: int
    axis: int | None
    columns: tuple[tuple[int, int], ...]
    sqnr_db: float
    variation_db: float
    informative: bool

    @classmethod
    def of(cls, figures: GroupFigures) -> GroupVerdict:
        """Builds the verdict on one group from its errors."""
        group = figures.group
        return cls(
            group.name,
            group.output,
            group.axis,
            group.runs,
            figures.sqnr_db,
            figures.variation_db,
            figures.informative,
        )


@dataclass(frozen=True, repr=False)
class Verdict(Displayed):
    """How good a quantized graph is.

    Attributes:
        word: good, check or broken.
        sqnr_db: the SQNR of the worst column group of all outputs, in dB; NaN if none could be compared.
        agreement: the share of samples whose largest output has the same index; None for outputs that are no
            scores of classes.
        metric: the user's metric of the quantized graph; None without one.
        float_metric: the same metric of the float graph.
        samples: the number of samples that it was measured on.
        measured_on: what these samples are, in words.
        at_least: the limit that the user gave for the metric, or for the SQNR without one; None for none.
            Lost rows count as noise there: see `counted_db`.
        groups: the column groups of the outputs.
        equal: the share of equal values of the worst output of integers, such as indices; None if all are
            equal. Those of which few are equal, while all are close, are numbers, compared like floats.
        uncompared: the places of the outputs that had other rows than float's in every batch.
        rows: of the rows that the graph selects, by a top-k, an arg-max or a suppression, the share that
            float selects, too, at the worst output; the other figures compare these. None if nothing selects.
        low_db: the SQNR that other samples may have by what these tell, in dB; None where they are exact.
        worst_sample_db: the SQNR of the worst sample, in dB; None where all are exact.
        seen: whether the samples are those of the calibration.
        doubted: whether the graph would be good if other samples were like these.
        one_number: whether each input of the samples is one number everywhere, so that they show nothing.
        constant: whether float gives the same outputs for all samples, which are not all the same.
        computed_by: what has computed the outputs, in words.
        file: the verdict on the finished file and more samples; None if there is none. The worse word is that
            of both.
        lowered: whether the word is that of the file alone.
        between_db: the SQNR of what differs between samples, of the worst column group, in dB; None where
            nothing differs, or all are exact.
        silent: the names of the outputs that are one number in float in all samples, and that number, beside
            others that are not.
    """

    word: str
    sqnr_db: float
    agreement: float | None
    metric: float | None
    float_metric: float | None
    samples: int
    measured_on: str
    at_least: float | None = None
    groups: tuple[GroupVerdict, ...] = ()
    equal: float | None = None
    uncompared: tuple[int, ...] = ()
    rows: float | None = None
    low_db: float | None = None
    worst_sample_db: float | None = None
    seen: bool = False
    doubted: bool = False
    one_number: bool = False
    constant: bool = False
    computed_by: str = FAKE_QUANTS
    file: Verdict | None = None
    lowered: bool = False
    between_db: float | None = None
    silent: tuple[tuple[str, float], ...] = ()

    def _text(self, max_width: int | None) -> str:
        return self.line()

    @property
    def worst(self) -> GroupVerdict | None:
        """The worst column group; None if none was compared."""
        return min(self.groups, key=lambda g: (g.informative, g.sqnr_db)) if self.groups else None

    @property
    def counted_db(self) -> float:
        """The SQNR for limits: the share of lost rows is noise, too, and the larger one counts."""
        if self.rows is None or math.isnan(self.sqnr_db):
            return self.sqnr_db
        return min(self.sqnr_db, decibels(1.0, 1.0 - self.rows))

    @property
    def passed(self) -> bool:
        """Whether the metric, or the SQNR without one, reaches the user's limit, that of the file too."""
        value = self.counted_db if self.metric is None else self.metric
        own = self.at_least is None or value >= self.at_least
        return own and (self.file is None or self.file.passed)

    def line(self) -> str:
        """Returns the verdict in a line."""
        parts = [self._headline(), *self._doubts()]
        if self.uncompared and not math.isnan(self.sqnr_db):
            plural = "s" if len(self.uncompared) > 1 else ""
            places = ", ".join(map(str, self.uncompared))
            parts.append(f"output{plural} {places} with other rows than float's, not compared")
        if self.rows is not None:
            parts.append(f"{self.rows:.1%} of the selected rows are float's")
        if self.equal is not None:
            parts.append(f"equal integers {_share(self.equal)}")
        if self.agreement is not None:
            parts.append(f"same prediction {self.agreement:.1%}")
        if self.metric is not None:
            parts.append(f"metric {self.metric:.4g} ({self.float_metric:.4g} in float)")
        if self.at_least is not None:
            parts.append(f"{'at' if self.passed else 'not at'} least {self.at_least:g}")
        where = f"on {self.samples} {self.measured_on} ({self.computed_by})"
        again = f"; {self.file._beside()}" if self.file is not None and self._is_notable(self.file) else ""
        return f"verdict: {self.word}: {', '.join(parts)}, {where}{again}"

    def with_file(self, file: Verdict) -> Verdict:
        """Returns the verdict with that on the finished file: the worse of both words.

        Args:
            file: the verdict on the file and more samples, without a metric.
        """
        word = min(self.word, file.word, key=_WORDS.index)
        limited = replace(file, at_least=self.at_least)
        return replace(self, word=word, file=limited, lowered=word != self.word)

    def _is_notable(self, file: Verdict) -> bool:
        """Whether the figures of the file change what is thought of it."""
        lower = file.sqnr_db < min(self.sqnr_db - _NOTABLE_DB, _PLENTY_DB)
        return self.lowered or lower or not file.passed or self.doubted

    def _beside(self) -> str:
        """Returns the figures of a file behind those of the graph that it was exported from."""
        parts = [self._headline(), *self._doubts()]
        if self.equal is not None:
            parts.append(f"equal integers {_share(self.equal)}")
        if self.agreement is not None and self.agreement < 1.0:
            parts.append(f"same prediction {self.agreement:.1%}")
        return f"{self.computed_by} has {', '.join(parts)}, on {self.samples} {self.measured_on}"

    def _headline(self) -> str:
        """Returns the figure of the worst column group; names the group if there are others."""
        if math.isnan(self.sqnr_db):
            return "outputs with other rows than float's, which only --metric can compare"
        if self.sqnr_db == -math.inf:
            return f"outputs that cannot be compared with float's{self._place()}"
        if not math.isfinite(self.sqnr_db) and not self.groups and self.rows == 0.0:
            return "outputs without a row of float's, nothing is left to compare"
        if not math.isfinite(self.sqnr_db) and self.rows is not None and self.rows < 1.0:
            return "no noise in the rows that are float's"
        if not math.isfinite(self.sqnr_db):
            return "outputs are exact" if self.equal is None else "some integers are not float's"
        lost = self.worst is not None and not self.worst.informative
        return f"output SQNR {self.sqnr_db:.1f} dB{self._place()}{', no information is left' if lost else ''}"

    def _doubts(self) -> list[str]:
        """Returns what keeps the figure from standing for every sample: few of them, and a bad one."""
        doubts = []
        if self.one_number:
            doubts.append("the inputs are one number everywhere and show nothing of other samples")
        if self.constant:
            doubts.append("float gives the same outputs for every sample, which show nothing of the network")
        if self.metric is None and self._is_above(GOOD_FROM_DB, self.low_db):
            reason = "it was calibrated on these" if self.seen else "these are few and unlike"
            doubts.append(f"other samples may have {self.low_db:.1f} dB, as {reason}")
        if any(self._is_above(limit, self.worst_sample_db) for limit in (GOOD_FROM_DB, BROKEN_BELOW_DB)):
            doubts.append(f"{self.worst_sample_db:.1f} dB in the worst sample")
        between = any(self._is_above(limit, self.between_db) for limit in (GOOD_FROM_DB, DIFFERING_DB))
        if self.metric is None and between:
            between_db = round(self.between_db or 0.0, 1) + 0.0  # which is no -0.0
            lost = ", which is lost or hardly anything" if between_db < NO_INFORMATION_DB else ""
            doubts.append(f"{between_db:.1f} dB in what differs between samples{lost}")
        doubts += [
            f"{name} is {number:g} in all samples, which show nothing of it" for name, number in self.silent
        ]
        return doubts

    def _is_above(self, limit: float, other_db: float | None) -> bool:
        """Whether the SQNR reaches a limit that another figure does not."""
        return other_db is not None and other_db < limit <= self.sqnr_db

    def _place(self) -> str:
        if self.worst is None or len(self.groups) < 2:
            return ""
        best = min(group.sqnr_db for group in self.groups if group is not self.worst)
        others = f"{best:.1f} dB or more" if math.isfinite(best) else "exact"
        return f" at {self.worst.name} (elsewhere {others})"


def _share(equal: float) -> str:
    """Returns a share that is no whole one."""
    return f"{min(equal, _NEARLY_ALL):.1%}"


def judge(
    sqnr_db: float,
    metric: float | None = None,
    float_metric: float | None = None,
    *,
    informative: bool = True,
    equal: float | None = None,
    compared: bool = True,
    rows: float | None = None,
    low_db: float | None = None,
    worst_sample_db: float | None = None,
    shows_nothing: bool = False,
    predictions: tuple[float, int] | None = None,
    between_db: float | None = None,
) -> str:
    """Returns good, check or broken.

    Args:
        sqnr_db: the SQNR of the worst column group; NaN if none could be compared.
        metric: the user's metric of the quantized graph, more is better; it decides if it is given.
        float_metric: the same metric of the float graph.
        informative: whether every column group carries information; if not, the graph is broken.
        equal: the share of equal values of the worst output of integers; None for none.
        compared: whether every float output could be compared; if not, a graph is good by a metric alone.
        rows: the share of selected rows that float selects, too; None if nothing selects.
        low_db: the SQNR that other samples may have; a graph is good if it is, or by a metric.
        worst_sample_db: the SQNR of the worst sample; if it is broken, a graph is good by a metric alone.
        shows_nothing: whether each input is one number everywhere, or float's outputs are the same for all
            samples; if so, a graph is good by a metric alone.
        predictions: the share of samples with float's prediction, and the number of samples; None for outputs
            that are no scores of classes. If two or more samples and a tenth of all have another prediction,
            a graph is good by a metric alone.
        between_db: the SQNR of what differs between samples; if it is low, a graph is good by a metric alone:
            the samples may be alike, or what is left of them a constant.
    """
    if rows is not None and metric is None:
        equal = rows if equal is None else min(rows, equal)
    if not informative or (equal is not None and equal < _BROKEN_EQUAL):
        return "broken"
    word = _judge_values(sqnr_db, metric, float_metric)
    doubtful = low_db is not None and low_db < GOOD_FROM_DB
    lost = worst_sample_db is not None and worst_sample_db < BROKEN_BELOW_DB
    alike = between_db is not None and between_db < DIFFERING_DB
    changed = predictions is not None and _are_changed(*predictions)
    if (
        word == "good"
        and metric is None
        and any((not compared, doubtful, lost, alike, shows_nothing, changed))
    ):
        return "check"
    return "check" if word == "good" and equal is not None and equal < GOOD_EQUAL else word


def _are_changed(same: float, samples: int) -> bool:
    return same < _GOOD_SAME and round((1.0 - same) * samples) >= _FEW_CHANGED


def _judge_values(sqnr_db: float, metric: float | None, float_metric: float | None) -> str:
    if metric is not None and float_metric is not None:
        loss = (float_metric - metric) / max(abs(float_metric), 1e-12)
        return "good" if loss <= _GOOD_LOSS else "check" if loss <= _BROKEN_LOSS else "broken"
    if math.isnan(sqnr_db):
        return "check"
    if sqnr_db < BROKEN_BELOW_DB:
        return "broken"
    return "good" if sqnr_db >= GOOD_FROM_DB else "check"
