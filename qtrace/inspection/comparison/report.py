"""What compare found: its rows, the table, the picture for notebooks, and the page as HTML."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from qtrace.display import Displayed, format_table
from qtrace.errors import ConfigError, QtraceError, install

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_MAX_LABELS = 60
_MAX_TITLES = 512  # of channels; more would make the page slow
_NEARLY_CLEAR = 0.001  # an area without any colour gets no pointer
_EXACT_DB = 80.0  # larger ratios are drawn at this height, as exact: infinity cannot stand on an axis


def _plot_waterfall(sites: Sequence[SiteComparison]) -> str:
    """Plots the ratios of the table in graph order: own error, inherited error and whole error."""
    titles = [f"{s.site}: SQNR {db(s.sqnr_db)} dB, own {db(s.own_db)} dB ({s.scheme})" for s in sites]

    def draw(axes: Axes) -> None:
        _draw_sites(axes, sites)
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


def _draw_sites(axes: Axes, sites: Sequence[SiteComparison]) -> None:
    place = np.arange(len(sites))
    whole, own, inherited = (
        np.minimum([getattr(site, name) for site in sites], _EXACT_DB)
        for name in ("sqnr_db", "own_db", "inherited_db")
    )
    finite = inherited < _EXACT_DB
    drawn = np.concatenate([whole, own, inherited[finite]])
    floor = float(drawn.min(initial=0.0))
    axes.bar(place, own - floor, bottom=floor, color=OWN, width=0.8, label="own: the error that arises here")
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


_WIDTH, _HEIGHT, _TOP, _LEFT = 720, 200, 22, 44  # in pixels

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
    lines = [_tick(decibels) for decibels in (0.0, _EXACT_DB / 2, _EXACT_DB)]
    caption = "SQNR of each activation in graph order, dB: own rounding dark, inherited light"
    return (
        f'<svg width="{_WIDTH}" height="{_TOP + _HEIGHT + 12}" font-family="sans-serif" font-size="11">'
        f'<text x="{_LEFT}" y="13">{caption}</text>{"".join(lines)}{"".join(bars)}</svg>'
    )


def _depth(decibels: float) -> float:
    """Returns how many pixels a bar of this ratio is long."""
    bounded = _EXACT_DB if math.isnan(decibels) else min(max(decibels, 0.0), _EXACT_DB)
    return (_EXACT_DB - bounded) / _EXACT_DB * _HEIGHT


def _tick(decibels: float) -> str:
    y = _TOP + _depth(decibels)
    return (
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{decibels:g}</text>'
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
    )
