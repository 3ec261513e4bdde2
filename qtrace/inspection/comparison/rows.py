"""The rows of a comparison: the errors of sites, groups and outputs, and the ranges of channels."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "ChannelRanges",
    "GroupComparison",
    "GroupCost",
    "Histogram",
    "OutputComparison",
    "SiteComparison",
    "db",
    "origin",
]


@dataclass(frozen=True)
class ChannelRanges:
    """The ranges of the channels of a site, for the page.

    Attributes:
        site: the name of the site.
        low, high: the smallest and the largest value of each channel.
        noise: the rounding error of each channel relative to its power.
        lo, hi: the smallest and the largest value that the site's integers stand for.
        remark: what is wrong with the site, in words; "" if nothing is known.
    """

    site: str
    low: tuple[float, ...]
    high: tuple[float, ...]
    noise: tuple[float, ...]
    lo: float
    hi: float
    remark: str = ""


@dataclass(frozen=True)
class Histogram:
    """The distribution of a site's float values, and the range of its integers.

    Attributes:
        left: the left end of the first bin.
        width: the width of a bin.
        counts: the number of values in each bin.
        lo, hi: the smallest and the largest value that the integers stand for.
        step: the distance between two values that integers stand for.
    """

    left: float
    width: float
    counts: tuple[int, ...]
    lo: float
    hi: float
    step: float


@dataclass(frozen=True)
class SiteComparison:
    """The error at one site, of activations or of a parameter.

    Ratios are of the float value's power to an error's power, in dB, over all batches.

    Attributes:
        site: the name of the site.
        sort: activation or weight.
        kind: the kind of op that computes the site; "" for parameters and the graph's inputs.
        group: the group whose parameters the site has.
        scheme: the scheme in words.
        values: the number of values that were compared.
        sqnr_db: ratio to the total error.
        own_db: ratio to the error that arises at the site: rounding, clipping and the op's rounded weights,
            with everything before the site in float.
        inherited_db: ratio to the error that earlier errors cause at the site; infinity without any.
        cosine: cosine of the angle between the float and the rounded tensor.
        clipped: the share of values outside the range.
        used: the share of the integers' range between the smallest and the largest that occurred.
        unequal: the number of batches in which the quantized graph had another number of rows, because a
            selection (NMS, a mask) depends on values. They are not compared; if none is, ratios are NaN.
    """

    site: str
    sort: str
    kind: str
    group: str
    scheme: str
    values: int
    sqnr_db: float
    own_db: float
    inherited_db: float
    cosine: float
    clipped: float
    used: float
    unequal: int = 0

    @property
    def unmeasured(self) -> bool:
        """Whether no batch could be compared."""
        return math.isnan(self.sqnr_db)


@dataclass(frozen=True)
class GroupCost:
    """The cost of shared parameters for the sites of a group.

    Attributes:
        group: the name of the group.
        sites: the names of its sites.
        cost_db: for each site, how much lower its rounding error would be, in dB, with parameters of its own
            (with the least squared error on its own distribution).
    """

    group: str
    sites: tuple[str, ...]
    cost_db: tuple[float, ...]

    @property
    def worst_db(self) -> float:
        """The largest cost of a site, in dB."""
        return max(self.cost_db)


@dataclass(frozen=True)
class GroupComparison:
    """The error of one column group of an output.

    Attributes:
        columns: the columns in words, such as "columns 4..84".
        axis: the axis along which columns count.
        runs: the columns as half-open runs.
        sqnr_db: float value to error, in dB.
        informative: whether the values tell anything of float's.
    """

    columns: str
    axis: int
    runs: tuple[tuple[int, int], ...]
    sqnr_db: float
    informative: bool

    def line(self) -> str:
        """Returns the columns and their ratio, in words."""
        lost = "" if self.informative else ", no information is left"
        return f"{self.columns}: {db(self.sqnr_db)} dB{lost}"


@dataclass(frozen=True)
class OutputComparison:
    """The error of one output of the graph.

    Attributes:
        index: the place of the output among the outputs.
        shape: the shape without the batch axis.
        sqnr_db: float value to error, in dB; of the worst column group. Minus infinity if float selects none
            of the rows, so that nothing is left to compare.
        cosine: cosine of the angle between the float and the quantized tensor; NaN if nothing is compared.
        same: for tensors of two axes, the share of rows whose largest value has the same index.
        unequal: the number of batches with another number of rows in the quantized graph.
        groups: the column groups of the output; () if all columns have like ranges.
        informative: whether the values tell anything of float's, in every column group.
        equal: of integers, the share of values that are float's for the same rows; None for floats.
        selected: the share of rows that float selects, too; None if no selection is before the output. All
            other figures compare equal rows.
    """

    index: int
    shape: tuple[int, ...]
    sqnr_db: float
    cosine: float
    same: float | None
    unequal: int = 0
    groups: tuple[GroupComparison, ...] = ()
    informative: bool = True
    equal: float | None = None
    selected: float | None = None

    def lines(self) -> list[str]:
        """Returns the error in words, and a line for each column group, the worst first."""
        same = "" if self.same is None else f", same prediction {self.same:.2%}"
        lost = "" if self.informative else ", no information is left"
        place = ""
        worst_first = sorted(self.groups, key=lambda g: (g.informative, g.sqnr_db))
        if worst_first:
            place, lost = f" at {worst_first[0].columns}", ""
        ratio = f"{db(self.sqnr_db)} dB{place}{lost}, cosine {self.cosine:.6f}{same}"
        figures = ratio if self.equal is None else f"integers, {self.equal:.2%} equal"
        rows = (
            "" if self.selected is None else f", {self.selected:.2%} of the rows are selected in float, too"
        )
        head = f"output {self.index}: {figures}{rows}"
        return [head, *(f"  {group.line()}" for group in worst_first)]


def db(value: float) -> str:
    """Formats a ratio in dB."""
    if math.isnan(value):
        return "-"
    return "inf" if value == float("inf") else f"{value:.1f}"


def origin(site: SiteComparison) -> str:
    """Returns the kind of op that computes a site, "input", or the sort of a parameter."""
    return site.kind or ("input" if site.sort == "activation" else site.sort)
