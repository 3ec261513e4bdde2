"""The verdict on a quantized graph, with the limits of its words."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from qtrace.comparing.sums import DIFFERING_MARGIN_DB, GroupFigures, decibels
from qtrace.display import Displayed
from qtrace.preparation.placement.labelling import WORTHLESS_DB

GOOD_FROM_DB = 20.0
"""From this SQNR of the worst column group on, a graph is called good: noise is at most 1 % of the signal."""
GOOD_NOISE = 10 ** (-GOOD_FROM_DB / 10)
"""The same as a share of the signal."""
BROKEN_BELOW_DB = WORTHLESS_DB
"""Below this SQNR a graph is called broken."""
DIFFERING_DB = GOOD_FROM_DB - DIFFERING_MARGIN_DB
"""Below this SQNR of what differs between samples a graph is not called good: noise is 5 % of that."""
MANY_SAMPLES = 64
"""As many samples show heavy tails and rare events that eight miss."""
GOOD_EQUAL = 0.9
"""From this share of right rows or predictions on, a graph may be good; a row is right or wrong."""
_BROKEN_LOSS = 0.05  # of the metric in float
_NEARLY_ALL = 0.999  # the largest share below 100.0 %, for shares that are not whole
_WORDS = ("broken", "check", "good")
_OF_SAMPLES = {"few-samples", "one-sample", "unlike-samples", "one-number", "constant-outputs"}


@dataclass(frozen=True)
class GroupVerdict:
    """How good one column group of an output is.

    Attributes:
        name: the output and the columns, in words.
        output: the place of the output among the graph's outputs.
        axis: the axis along which columns count; None for the whole output.
        columns: the columns as half-open runs; () for the whole output.
        sqnr_db: the SQNR of the group in dB.
        variation_db: the ratio of the variation within columns to the error's, in dB: what is left of
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


@dataclass(frozen=True)
class Doubt:
    """Why the figures of a verdict may not stand for other samples.

    Attributes:
        kind: a name that stays the same, such as ``few-samples``.
        text: a sentence that ends with the cure.
        lowers: whether a graph with this doubt is at most ``check``, unless a metric decides.
    """

    kind: str
    text: str
    lowers: bool = True


@dataclass(frozen=True, repr=False)
class Verdict(Displayed):
    """How good a quantized graph is: a word, four figures, and a list of doubts.

    Attributes:
        word: good, check or broken.
        sqnr_db: the SQNR of the worst column group of all outputs, in dB; NaN if none could be compared.
        metric: the user's metric of the quantized graph; None without one.
        float_metric: the same metric of the float graph.
        rows: of the rows that the graph selects, by a top-k, an arg-max or a suppression, the share that
            float selects, too, at the worst output; the other figures compare these. None if nothing selects.
        agreement: the share of predictions that are float's: of samples whose largest output has the same
            index, or of the values of the worst output of indices. None for outputs of other kinds.
        samples: the number of samples that it was measured on.
        measured_on: what these samples are, in words.
        groups: the column groups of the outputs.
        doubts: why the figures may not stand for other samples.
        at_least: the limit that the user gave for the metric, or for the SQNR without one; None for none.
            Lost rows count as noise there: see `counted_db`.
        passed: whether the limit holds.
    """

    word: str
    sqnr_db: float
    metric: float | None
    float_metric: float | None
    rows: float | None
    agreement: float | None
    samples: int
    measured_on: str
    groups: tuple[GroupVerdict, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    at_least: float | None = None
    passed: bool = True

    def _text(self, max_width: int | None) -> str:
        return "\n".join(self.lines())

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
    def doubted(self) -> bool:
        """Whether the graph would be good if other samples were like these."""
        kinds = {doubt.kind for doubt in self.doubts if doubt.lowers}
        good = self.metric is None and self.sqnr_db >= GOOD_FROM_DB
        return self.word == "check" and good and bool(kinds) and kinds <= _OF_SAMPLES

    def has(self, kind: str) -> bool:
        """Whether there is a doubt of a kind."""
        return any(doubt.kind == kind for doubt in self.doubts)

    def lines(self) -> list[str]:
        """Returns the word with the figures, and each doubt, a line each."""
        return [self.line(), *(f"  {doubt.text}" for doubt in self.doubts)]

    def line(self) -> str:
        """Returns the word and the figures in a line."""
        return f"verdict   {self.describe()}"

    def describe(self) -> str:
        """Returns the word and the figures."""
        parts = [self.headline()]
        if self.rows is not None:
            parts.append(f"{_share(self.rows)} of the rows selected as in float")
        if self.agreement is not None:
            parts.append(f"{_share(self.agreement)} equal predictions")
        if self.metric is not None:
            parts.append(f"metric {self.metric:.4g} ({self.float_metric:.4g} in float)")
        if self.at_least is not None:
            parts.append(f"{'at' if self.passed else 'not at'} least {self.at_least:g}")
        return f"{self.word}: {', '.join(parts)}, on {self.samples} {self.measured_on}"

    def headline(self) -> str:
        """Returns the figure of the worst column group; names the group if there are others."""
        if math.isnan(self.sqnr_db):
            return "no output could be compared"
        if self.sqnr_db == -math.inf:
            return f"outputs that cannot be compared with float's{self._place()}"
        if math.isfinite(self.sqnr_db):
            lost = self.worst is not None and not self.worst.informative
            return f"{self.sqnr_db:.1f} dB{self._place()}{', no information is left' if lost else ''}"
        shares = [share for share in (self.rows, self.agreement) if share is not None]
        if not self.groups and self.rows == 0.0:
            return "no row of float's is left to compare"
        return "no noise in what is float's" if min(shares, default=1.0) < 1.0 else "outputs are exact"

    def _place(self) -> str:
        named = self.worst is not None and len(self.groups) > 1
        return f" in the worst output group ({self.worst.name})" if named and self.worst else " at the output"

    def limited(self, at_least: float | None) -> Verdict:
        """Returns the verdict with a limit for the metric, or for the SQNR in dB without one."""
        value = self.counted_db if self.metric is None else self.metric
        return replace(self, at_least=at_least, passed=at_least is None or value >= at_least)

    def with_doubts(self, doubts: tuple[Doubt, ...]) -> Verdict:
        """Returns the verdict with more doubts: a good one becomes ``check`` by those that lower it."""
        lowered = self.word == "good" and any(doubt.lowers for doubt in doubts)
        return replace(self, word="check" if lowered else self.word, doubts=(*self.doubts, *doubts))

    def with_file(self, file: Verdict) -> Verdict:
        """Returns the verdict with that on the finished file: the worse of both words.

        Args:
            file: the verdict on the file and more samples, without a metric.
        """
        word = min(self.word, file.word, key=_WORDS.index)
        passed = file.limited(self.at_least).passed
        if word == self.word and (passed or not self.passed):
            return self
        doubt = Doubt(
            "file",
            f"The file has {file.headline()} on {file.samples} {file.measured_on}: calibrate on more samples "
            "like those it loses.",
        )
        more = tuple(d for d in file.doubts if d.lowers and not self.has(d.kind))
        return replace(self, word=word, doubts=(*self.doubts, doubt, *more), passed=self.passed and passed)


def _share(share: float) -> str:
    """Returns a share in per cent, one that is not whole below 100 %."""
    return "100%" if share >= 1.0 else f"{min(share, _NEARLY_ALL):.1%}"


def judge(
    sqnr_db: float,
    metric: float | None = None,
    float_metric: float | None = None,
    *,
    informative: bool = True,
    doubts: tuple[Doubt, ...] = (),
) -> str:
    """Returns good, check or broken.

    Args:
        sqnr_db: the SQNR of the worst column group; NaN if none could be compared.
        metric: the user's metric of the quantized graph, more is better; it decides if it is given.
        float_metric: the same metric of the float graph.
        informative: whether every output carries information; if not, the graph is broken.
        doubts: what keeps a graph from being good without a metric.
    """
    if not informative:
        return "broken"
    if metric is not None and float_metric is not None:
        loss = (float_metric - metric) / max(abs(float_metric), 1e-12)
        return "good" if loss <= GOOD_NOISE else "check" if loss <= _BROKEN_LOSS else "broken"
    if sqnr_db < BROKEN_BELOW_DB:
        return "broken"
    return "good" if sqnr_db >= GOOD_FROM_DB and not any(doubt.lowers for doubt in doubts) else "check"
