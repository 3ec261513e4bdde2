"""The report of compare, as data, table and JSON."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qtrace.display import Displayed, format_table
from qtrace.errors import ConfigError
from qtrace.inspection.comparison.page import Page, render
from qtrace.inspection.comparison.rows import (
    ChannelRanges,
    GroupCost,
    Histogram,
    OutputComparison,
    SiteComparison,
    db,
    origin,
)

__all__ = ["Comparison"]

_WIDTH, _HEIGHT, _TOP, _LEFT = 720, 200, 22, 44  # in pixels
_CEILING = 80.0  # dB: above it a site counts as exact
_TICKS = (0, 20, 40, 60, 80)

# Column of the table -> whether the smallest comes first.
_ORDERS = {"graph": None, "sqnr": "sqnr_db", "own": "own_db", "cosine": "cosine", "clipped": "clipped"}


@dataclass(frozen=True, repr=False)
class Comparison(Displayed):
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

    def _figure(self) -> str:
        return _draw_waterfall(self.sites)

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
        lines += [line for output in self.outputs for line in output.lines()]
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
            findings: lines for the top of the page, such as a diagnosis gives.
            channels: sites whose channels are drawn, in the order of the page.

        Raises:
            QtraceError: when the extra ``report`` is not installed.
        """
        worst = tuple((site, self.histograms[site.site]) for site in self.worst())
        heading = (self.name, self.backend, self.samples, self.batches, self.note)
        return render(Page(*heading, self.outputs, self.sites, self.groups, worst, findings, channels))


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


def _costliest(group: GroupCost) -> str:
    return group.sites[group.cost_db.index(group.worst_db)]


def _draw_waterfall(sites: Sequence[SiteComparison]) -> str:
    """Draws one bar for each activation, in graph order, as an SVG element; "" without measured activations.

    A bar reaches down from 80 dB to the site's SQNR: the longer, the noisier. Its dark part is the error of
    the site's own rounding; the light part comes from the sites before it.

    Args:
        sites: the sites in graph order.
    """
    shown = [site for site in sites if site.sort == "activation" and not site.unmeasured]
    if not shown:
        return ""
    step = (_WIDTH - _LEFT) / len(shown)
    bars = []
    for index, site in enumerate(shown):
        own, whole = _depth(site.own_db), max(_depth(site.sqnr_db), _depth(site.own_db))
        place = f'x="{_LEFT + index * step:.1f}" y="{_TOP}" width="{max(step - 1, 0.5):.1f}"'
        title = f"{site.site}: {site.sqnr_db:.1f} dB, own {site.own_db:.1f} dB, {site.scheme}"
        bars.append(
            f"<g><title>{html.escape(title)}</title>"
            f'<rect {place} height="{whole:.1f}" fill="#9ecae1"/>'
            f'<rect {place} height="{own:.1f}" fill="#08519c"/></g>'
        )
    lines = [_tick(decibels) for decibels in _TICKS]
    caption = "SQNR of each activation in graph order, dB: own rounding dark, inherited light"
    return (
        f'<svg width="{_WIDTH}" height="{_TOP + _HEIGHT + 12}" font-family="sans-serif" font-size="11">'
        f'<text x="{_LEFT}" y="13">{caption}</text>{"".join(lines)}{"".join(bars)}</svg>'
    )


def _depth(decibels: float) -> float:
    """Returns how many pixels a bar of this ratio is long."""
    bounded = _CEILING if math.isnan(decibels) else min(max(decibels, 0.0), _CEILING)
    return (_CEILING - bounded) / _CEILING * _HEIGHT


def _tick(decibels: int) -> str:
    y = _TOP + _depth(decibels)
    return (
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{decibels}</text>'
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
    )
