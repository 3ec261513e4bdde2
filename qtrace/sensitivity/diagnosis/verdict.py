"""The verdict on a quantized graph, with the limits of its words."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["BROKEN_BELOW_DB", "GOOD_FROM_DB", "Verdict", "judge"]

GOOD_FROM_DB = 20.0
"""From this SQNR at the outputs on, a graph is called good: the noise is at most 1 % of the signal."""
BROKEN_BELOW_DB = 10.0
"""Below this SQNR a graph is called broken: the noise is more than 10 % of the signal."""
_GOOD_LOSS = 0.01  # of the metric in float
_BROKEN_LOSS = 0.05


@dataclass(frozen=True)
class Verdict:
    """How good a quantized graph is.

    Attributes:
        word: good, check or broken.
        sqnr_db: the SQNR of the outputs in dB, of the mean noise relative to the signal over all outputs.
        agreement: the share of samples whose largest output has the same index; None for outputs that are no
            scores of classes.
        metric: the user's metric of the quantized graph; None without one.
        float_metric: the same metric of the float graph.
        samples: the number of samples that it was measured on.
        measured_on: what these samples are, in words.
        at_least: the limit that the user gave for the metric, or for the SQNR without one; None for none.
    """

    word: str
    sqnr_db: float
    agreement: float | None
    metric: float | None
    float_metric: float | None
    samples: int
    measured_on: str
    at_least: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the metric, or the SQNR without one, reaches the user's limit."""
        value = self.sqnr_db if self.metric is None else self.metric
        return self.at_least is None or value >= self.at_least

    def line(self) -> str:
        """Returns the verdict in a line."""
        parts = [f"output SQNR {self.sqnr_db:.1f} dB" if math.isfinite(self.sqnr_db) else "outputs are exact"]
        if self.sqnr_db == -math.inf or math.isnan(self.sqnr_db):
            parts = ["outputs that cannot be compared with float's"]
        if self.agreement is not None:
            parts.append(f"same prediction {self.agreement:.1%}")
        if self.metric is not None:
            parts.append(f"metric {self.metric:.4g} ({self.float_metric:.4g} in float)")
        if self.at_least is not None:
            parts.append(f"{'at' if self.passed else 'not at'} least {self.at_least:g}")
        return f"verdict: {self.word}: {', '.join(parts)}, on {self.samples} {self.measured_on}"


def judge(sqnr_db: float, metric: float | None = None, float_metric: float | None = None) -> str:
    """Returns good, check or broken.

    Args:
        sqnr_db: the SQNR of the outputs.
        metric: the user's metric of the quantized graph, more is better; it decides if it is given.
        float_metric: the same metric of the float graph.
    """
    if metric is not None and float_metric is not None:
        loss = (float_metric - metric) / max(abs(float_metric), 1e-12)
        return "good" if loss <= _GOOD_LOSS else "check" if loss <= _BROKEN_LOSS else "broken"
    if math.isnan(sqnr_db) or sqnr_db < BROKEN_BELOW_DB:
        return "broken"
    return "good" if sqnr_db >= GOOD_FROM_DB else "check"
