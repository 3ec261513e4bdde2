"""The page of a comparison: HTML with its plots inside, which needs no other file and no network.

The plots of the page, as SVG text. The colours differ for readers who cannot tell red from green.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from qtrace.errors import QtraceError, install
from qtrace.inspection.comparison.rows import (
    ChannelRanges,
    GroupCost,
    Histogram,
    OutputComparison,
    SiteComparison,
    db,
    origin,
)

__all__ = ["Page", "render"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEMPLATE = "page.html.j2"


@dataclass(frozen=True)
class Page:
    """What the page shows.

    Attributes:
        name: the recipe's name, or "".
        backend: the target.
        samples: the number of samples in all batches.
        batches: the number of batches.
        note: what "float" stands for, if that is not the traced network; else "".
        outputs: the error of each output.
        sites: the error of every site, in graph order.
        groups: the cost of every group of several sites.
        worst: the sites whose own error is largest, and the distributions of their float values.
        findings: lines for the top of the page.
        channels: sites whose channels are drawn.
    """

    name: str
    backend: str
    samples: int
    batches: int
    note: str
    outputs: Sequence[OutputComparison]
    sites: Sequence[SiteComparison]
    groups: Sequence[GroupCost]
    worst: Sequence[tuple[SiteComparison, Histogram]]
    findings: Sequence[str] = ()
    channels: Sequence[ChannelRanges] = ()


def render(page: Page) -> str:
    """Renders the page as text.

    Raises:
        QtraceError: when the extra ``report`` is not installed.
    """
    try:
        import jinja2
        import matplotlib  # noqa: F401 - a missing extra is reported before the work begins
    except ImportError as error:
        raise QtraceError(
            f"the page needs {error.name}, which is not installed: {install('report')}."
        ) from error
    activations = [s for s in page.sites if s.sort == "activation" and not s.unmeasured]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = resources.files("qtrace.inspection.comparison").joinpath(_TEMPLATE).read_text("utf-8")
    return environment.from_string(text).render(
        c=page,
        db=db,
        origin=origin,
        waterfall=_plot_waterfall(activations),
        worst=[(site, _plot_distribution(site, histogram)) for site, histogram in page.worst],
        channels=[(ranges, _plot_channels(ranges, i)) for i, ranges in enumerate(page.channels)],
    )


WHOLE, OWN, INHERITED, RANGE = "#1b3a5c", "#e69f00", "#56a3d9", "#009e73"
_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched and copied
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_MAX_LABELS = 60
_MAX_TITLES = 512  # of channels; more would make the page slow
_NEARLY_CLEAR = 0.001  # an area without any colour gets no pointer
_BEST_DB = 100.0  # larger ratios are drawn at this height: infinity cannot stand on an axis


def _plot_waterfall(sites: Sequence[SiteComparison]) -> str:
    """Plots the ratios of the table in graph order: own error, inherited error and whole error."""
    titles = [f"{s.site}: SQNR {db(s.sqnr_db)} dB, own {db(s.own_db)} dB ({s.scheme})" for s in sites]

    def draw(axes: Axes) -> None:
        _draw_waterfall(axes, sites)
        _draw_areas(axes, "site", len(sites))

    return _svg((11.0, 5.2), "waterfall", draw, {f"site-{i}": title for i, title in enumerate(titles)})


def _plot_channels(ranges: ChannelRanges, number: int) -> str:
    """Plots the range of each channel of a site, and the range of the site's integers.

    Args:
        ranges: the ranges.
        number: another one for each plot of a page.
    """
    count = min(len(ranges.low), _MAX_TITLES)
    columns = zip(ranges.low[:count], ranges.high, ranges.noise, strict=False)
    titles = [
        f"channel {i}: {low:.4g} to {high:.4g}, noise {noise:.2%} of its power"
        for i, (low, high, noise) in enumerate(columns)
    ]

    def draw(axes: Axes) -> None:
        _draw_channels(axes, ranges)
        _draw_areas(axes, f"channel-{number}", count)

    named = {f"channel-{number}-{i}": title for i, title in enumerate(titles)}
    return _svg((5.2, 2.6), f"channels {number}", draw, named)


def _plot_distribution(site: SiteComparison, histogram: Histogram) -> str:
    """Plots the distribution of a site's float values and the range of its integers."""
    return _svg((5.2, 2.6), site.site, lambda axes: _draw_distribution(axes, histogram))


def _draw_waterfall(axes: Axes, sites: Sequence[SiteComparison]) -> None:
    place = np.arange(len(sites))
    whole, own, inherited = (
        np.minimum([getattr(site, name) for site in sites], _BEST_DB)
        for name in ("sqnr_db", "own_db", "inherited_db")
    )
    drawn = np.concatenate([whole, own])
    floor = float(drawn.min(initial=0.0))
    axes.bar(place, own - floor, bottom=floor, color=OWN, width=0.8, label="own: the error that arises here")
    finite = inherited < _BEST_DB
    axes.plot(place[finite], inherited[finite], ".", color=INHERITED, label="inherited: the errors before")
    axes.step(place, whole, where="mid", color=WHOLE, linewidth=1.6, label="SQNR: the whole error")
    axes.set_ylabel("signal to error, dB (higher is better)")
    axes.set_ylim(floor, float(drawn.max(initial=floor + 1.0)) + 3.0)
    axes.margins(x=0.01)
    every = max(1, -(-len(sites) // _MAX_LABELS))
    axes.set_xticks(place[::every], [site.site for site in sites[::every]], rotation=90, fontsize=7)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, fontsize=8, frameon=False)


def _draw_distribution(axes: Axes, histogram: Histogram) -> None:
    counts = np.array(histogram.counts, np.float64)
    left = histogram.left + histogram.width * np.arange(len(counts))
    axes.axvspan(histogram.lo, histogram.hi, color=RANGE, alpha=0.15, label="range", linewidth=0)
    for end in (histogram.lo, histogram.hi):
        axes.axvline(end, color=RANGE, linewidth=1.2)
    axes.bar(left, counts, width=histogram.width, align="edge", color=WHOLE, linewidth=0)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    axes.set_xlabel(f"value; one step is {histogram.step:.3g}")
    axes.set_ylabel("count")
    axes.legend(loc="upper right", fontsize=7, framealpha=0.9)


def _draw_channels(axes: Axes, ranges: ChannelRanges) -> None:
    place = np.arange(len(ranges.low))
    low, high = np.array(ranges.low), np.array(ranges.high)
    axes.axhspan(ranges.lo, ranges.hi, color=RANGE, alpha=0.15, label="range of the integers", linewidth=0)
    axes.bar(place, high - low, bottom=low, color=WHOLE, width=0.8, linewidth=0, label="range of a channel")
    axes.set_xlabel("channel")
    axes.set_ylabel("value")
    axes.margins(x=0.01)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, fontsize=7, frameon=False)


def _draw_areas(axes: Axes, name: str, count: int) -> None:
    """Covers each column of a plot with an area as high as the plot, that can have a title."""
    low, high = axes.get_ylim()
    for i in range(count):
        [area] = axes.bar(i, high - low, bottom=low, width=1.0, color=WHOLE, alpha=_NEARLY_CLEAR, linewidth=0)
        area.set_gid(f"{name}-{i}")
    axes.set_ylim(low, high)


def _svg(
    size: tuple[float, float],
    name: str,
    draw: Callable[[Axes], None],
    titles: Mapping[str, str] | None = None,
) -> str:
    """Returns a plot as SVG; ``titles`` are shown when the pointer is on the element with that id."""
    import matplotlib
    from matplotlib.figure import Figure

    stream = io.StringIO()
    # The salt keeps ids apart on one page, and equal from run to run.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    for key, title in (titles or {}).items():
        text = text.replace(f'<g id="{key}">', f'<g id="{key}"><title>{html.escape(title)}</title>', 1)
    return text[text.index("<svg") :]  # without the prolog, which cannot stand inside a page
