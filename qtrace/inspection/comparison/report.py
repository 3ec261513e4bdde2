"""What compare found, as data, table and JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from qtrace.errors import ConfigError
from qtrace.graph.table import format_table
from qtrace.inspection.comparison.tally import Histogram

__all__ = ["Comparison", "GroupCost", "Output", "SiteError"]

# Column of the table -> whether the smallest comes first.
_ORDERS = {"graph": None, "sqnr": "sqnr_db", "own": "own_db", "cosine": "cosine", "clipped": "clipped"}


@dataclass(frozen=True)
class SiteError:
    """The error at one site, of activations or of a parameter.

    Ratios are of the float value's power to that of an error, in dB, over all batches.

    Attributes:
        site: its name.
        sort: activation or weight.
        kind: the kind of op that computes it; "" for parameters and the graph's inputs.
        group: the group whose parameters it has.
        scheme: in words.
        values: how many were compared.
        sqnr_db: float value to the whole error.
        own_db: to the error that arises here: rounding and clipping, and the op's rounded weights, with all
            that comes before in float.
        inherited_db: to what the errors before make of it; infinity where there are none.
        cosine: of the angle between the float and the rounded tensor.
        clipped: the share of values outside the range.
        used: the share of the integers' range between the smallest and the largest that occurred.
        unequal: in how many batches the quantized graph had another number of rows, because a selection (NMS,
            a mask) depends on values; those are not compared, and without any other batch ratios are NaN.
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
    """What sharing parameters costs the sites of a group.

    Attributes:
        group: its name.
        sites: who shares.
        cost_db: for each of them, how much lower the error of rounding would be with parameters of its own:
            those of least squared error on its own distribution.
    """

    group: str
    sites: tuple[str, ...]
    cost_db: tuple[float, ...]

    @property
    def worst_db(self) -> float:
        """The cost for the site that pays most."""
        return max(self.cost_db)


@dataclass(frozen=True)
class Output:
    """The error of one tensor that the graph gives.

    Attributes:
        index: its place among the outputs.
        shape: without the batch axis.
        sqnr_db: float value to error, in dB.
        cosine: of the angle between the two.
        same: for tensors of two axes, the share of rows whose largest value has the same index.
        unequal: in how many batches the quantized graph gave another number of rows, see `SiteError`.
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
        batches: how many were run.
        samples: how many samples they held.
        outputs: one for each tensor that the graph gives.
        sites: every site, in graph order.
        groups: every group of several sites.
        histograms: site -> distribution of its float values.
        note: what "float" stands for, where that is not the network that was traced; else "".
        selection: the first op that selects rows by their values, in words; "" where there is none.
    """

    backend: str
    name: str
    batches: int
    samples: int
    outputs: tuple[Output, ...]
    sites: tuple[SiteError, ...]
    groups: tuple[GroupCost, ...]
    histograms: dict[str, Histogram]
    note: str = ""
    selection: str = ""

    def worst(self, count: int = 10) -> tuple[SiteError, ...]:
        """The activations with the largest error of their own, relative to their signal."""
        found = [site for site in self.sites if site.sort == "activation" and not site.unmeasured]
        return tuple(sorted(found, key=lambda s: s.own_db)[:count])

    def table(self, max_width: int | None = 140, sort: str = "graph") -> str:
        """A text table of the sites, then of groups, then the outputs.

        Args:
            max_width: columns to fit into; None for no limit.
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
            rows = [(g.group, len(g.sites), f"{g.worst_db:.1f}", _dearest(g)) for g in self.groups]
            names = ("shared by a group", "sites", "cost dB", "who pays most")
            parts.append(format_table(names, rows, max_width))
        return "\n\n".join((*parts, self.summary()))

    def summary(self) -> str:
        """The error of the outputs, a line each, and what is to be known of it."""
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
        """All of it as plain data."""
        return asdict(self)

    def html(self) -> str:
        """The page with plots, in one file that needs no other.

        Raises:
            QtraceError: when the extra ``report`` is not installed.
        """
        from qtrace.inspection.comparison.page import render

        return render(self)


def db(value: float) -> str:
    """A ratio as it is printed."""
    if math.isnan(value):
        return "-"
    return "inf" if value == float("inf") else f"{value:.1f}"


def _cells(site: SiteError) -> tuple[str, ...]:
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


def origin(site: SiteError) -> str:
    """What gives the values of a site, in a word."""
    return site.kind or ("input" if site.sort == "activation" else site.sort)


def _dearest(group: GroupCost) -> str:
    return group.sites[group.cost_db.index(group.worst_db)]
