"""The page of a comparison: HTML with its plots inside, which needs no other file and no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from qtrace.errors import QtraceError, install
from qtrace.inspection.comparison import _plots
from qtrace.inspection.comparison.rows import (
    ChannelRanges,
    GroupCost,
    Histogram,
    OutputComparison,
    SiteComparison,
    db,
    origin,
)

__all__ = ["render"]

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
        waterfall=_plots.waterfall(activations),
        worst=[(site, _plots.distribution(site, histogram)) for site, histogram in page.worst],
        channels=[(ranges, _plots.channels(ranges, i)) for i, ranges in enumerate(page.channels)],
    )
