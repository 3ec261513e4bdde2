"""The report of compare, as data, table and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qtrace.errors import ConfigError
from qtrace.graph.table import format_table
from qtrace.inspection.comparison.tally import Histogram

__all__ = ["ChannelRanges", "Comparison", "GroupCost", "OutputComparison", "SiteComparison"]

# Column of the table -> whether the smallest comes first.
_ORDERS = {"graph": None, "sqnr": "sqnr_db", "own": "own_db", "cosine": "cosine", "clipped": "clipped"}


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
class SiteComparison:
    """The error at one site, of activations or of a parameter.

    Ratios are of the float value's power to that of an error, in dB, over all batches.

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
            (those of least squared error on its own distribution).
    """

    group: str
    sites: tuple[str, ...]
    cost_db: tuple[float, ...]

    @property
    def worst_db(self) -> float:
        """The largest cost of a site, in dB."""
        return max(self.cost_db)


@dataclass(frozen=True)
class OutputComparison:
    """The error of one output of the graph.

    Attributes:
        index: the place of the output among the outputs.
        shape: the shape without the batch axis.
        sqnr_db: float value to error, in dB.
        cosine: cosine of the angle between the float and the quantized tensor.
        same: for tensors of two axes, the share of rows whose largest value has the same index.
        unequal: the number of batches with another number of rows in the quantized graph.
    """

    index: int
    shape: tuple[int, ...]
    sqnr_db: float
    cosine: float
    same: float | None
    unequal: int = 0


@dataclass(frozen=True)
class Comparison:
    """The outcome of ``qtrace.compare``.

    Attributes:
        backend: the target.
        name: the recipe's name, or "".
        batches: the number of batches.
        samples: the number of samples in all batches.
        outputs: the error of each output.
        sites: the error of every site, in graph order.
        groups: the cost of every group of several sites.
        histograms: site -> distribution of its float values.
        note: what "float" stands for, if that is not the traced network; else "".
        selection: the first op that selects rows by their values, in words; "" where there is none.
    """

    backend: str
    name: str
    batches: int
    samples: int
    outputs: tuple[OutputComparison, ...]
    sites: tuple[SiteComparison, ...]
    groups: tuple[GroupCost, ...]
    histograms: dict[str, Histogram]
    note: str = ""
    selection: str = ""

    def worst(self, count: int = 10) -> tuple[SiteComparison, ...]:
        """Returns the activations whose own error is largest, relative to their signal."""
        activations = [site for site in self.sites if site.sort == "activation" and not site.unmeasured]
        return tuple(sorted(activations, key=lambda s: s.own_db)[:count])

    def table(self, max_width: int | None = 140, sort: str = "graph") -> str:
        """Returns a text table of the sites, then of the groups, then of the outputs.

        Args:
            max_width: the largest width in characters; None for no limit.
            sort: the order of the sites: ``graph``, or by the column ``sqnr``, ``own``, ``cosine`` or
                ``clipped``, the worst first.

        Raises:
            ConfigError: for an unknown order.
        """
        if sort not in _ORDERS:
            raise ConfigError(f"unknown order {sort!r}; known: {', '.join(_ORDERS)}.")
        key = _ORDERS[sort]
        sites = self.sites
        if key is not None:
            sign = -1 if key == "clipped" else 1
            sites = tuple(sorted(sites, key=lambda s: (s.unmeasured, sign * getattr(s, key))))
        headers = ("site", "op", "scheme", "SQNR dB", "own dB", "inherited dB", "cosine", "clipped", "used")
        parts = [format_table(headers, map(_cells, sites), max_width)]
        if self.groups:
            rows = [(g.group, len(g.sites), f"{g.worst_db:.1f}", _costliest(g)) for g in self.groups]
            names = ("shared by a group", "sites", "cost dB", "who pays most")
            parts.append(format_table(names, rows, max_width))
        return "\n\n".join((*parts, self.summary()))

    def summary(self) -> str:
        """Returns the error of the outputs, a line each, and remarks on it."""
        lines = [f"{self.samples} samples in {self.batches} batches, {len(self.sites)} sites"]
        for output in self.outputs:
            same = "" if output.same is None else f", same prediction {output.same:.2%}"
            lines.append(f"output {output.index}: {db(output.sqnr_db)} dB, cosine {output.cosine:.6f}{same}")
        unequal = [(f"site {s.site}", s.unequal) for s in self.sites if s.unequal]
        unequal += [(f"output {o.index}", o.unequal) for o in self.outputs if o.unequal]
        if unequal:
            others = f" and {len(unequal) - 1} more" if len(unequal) > 1 else ""
            lines.append(
                f"{unequal[0][0]}{others}: not compared in {max(n for _, n in unequal)} of "
                f"{self.batches} batches, where the quantized graph has another number of rows than the "
                f"float one: the number depends on values, which {self.selection} selects"
            )
        if self.note:
            lines.append(f"note: {self.note}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain data."""
        return asdict(self)

    def html(self, findings: Sequence[str] = (), channels: Sequence[ChannelRanges] = ()) -> str:
        """Returns the page with plots as one self-contained HTML file.

        Args:
            findings: lines for the top of the page, such as those of a diagnosis.
            channels: sites whose channels are drawn, in the order of the page.

        Raises:
            QtraceError: when the extra ``report`` is not installed.
        """
        from qtrace.inspection.comparison.page import render

        return render(self, findings, channels)


def db(value: float) -> str:
    """Formats a ratio in dB."""
    if math.isnan(value):
        return "-"
    return "inf" if value == float("inf") else f"{value:.1f}"


def _cells(site: SiteComparison) -> tuple[str, ...]:
    return (
        site.site,
        origin(site),
        site.scheme,
        db(site.sqnr_db),
        db(site.own_db),
        db(site.inherited_db),
        f"{site.cosine:.5f}",
        f"{site.clipped:.3%}",
        f"{site.used:.1%}",
    )


def origin(site: SiteComparison) -> str:
    """Returns the kind of op that computes a site, "input", or the sort of a parameter."""
    return site.kind or ("input" if site.sort == "activation" else site.sort)


def _costliest(group: GroupCost) -> str:
    return group.sites[group.cost_db.index(group.worst_db)]
