"""The page of a comparison: HTML with its plots inside, which needs no other file and no network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from qtrace.errors import QtraceError
from qtrace.inspection.comparison import _plots
from qtrace.inspection.comparison.report import ChannelRanges, Comparison, db, origin

__all__ = ["render"]

_WORST_SITES = 10
_TEMPLATE = "page.html.j2"


def render(
    comparison: Comparison, findings: Sequence[str] = (), channels: Sequence[ChannelRanges] = ()
) -> str:
    """Renders the page as text.

    Args:
        comparison: the comparison.
        findings: lines for the top of the page.
        channels: sites whose channels are drawn.

    Raises:
        QtraceError: when the extra ``report`` is not installed.
    """
    try:
        import jinja2
        import matplotlib  # noqa: F401 - a missing extra is reported before the work begins
    except ImportError as error:
        raise QtraceError(
            f"the page needs {error.name}, which is not installed: pip install 'qtrace[report]'."
        ) from error
    activations = [s for s in comparison.sites if s.sort == "activation" and not s.unmeasured]
    worst = [
        (site, _plots.distribution(site, comparison.histograms[site.site]))
        for site in comparison.worst(_WORST_SITES)
    ]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = resources.files("qtrace.inspection.comparison").joinpath(_TEMPLATE).read_text("utf-8")
    waterfall = _plots.waterfall(activations)
    drawn = [(ranges, _plots.channels(ranges, number)) for number, ranges in enumerate(channels)]
    return environment.from_string(text).render(
        c=comparison,
        db=db,
        origin=origin,
        waterfall=waterfall,
        worst=worst,
        findings=findings,
        channels=drawn,
    )
