"""The noise of the activations along the graph, as a picture for notebooks that needs no plotting library."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from qtrace.inspection.comparison.rows import SiteComparison

__all__ = ["draw_waterfall"]

_WIDTH, _HEIGHT, _TOP, _LEFT = 720, 200, 22, 44  # in pixels
_CEILING = 80.0  # dB: above it a site counts as exact
_TICKS = (0, 20, 40, 60, 80)


def draw_waterfall(sites: Sequence[SiteComparison]) -> str:
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
