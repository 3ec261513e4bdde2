"""The range that clips a given share of the values at either end."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from qtrace.observers.base import State
from qtrace.observers.statistics import HistogramObserver, origin_of
from qtrace.plugins.options import Float

__all__ = ["Percentile"]


class Percentile(HistogramObserver):
    """Cuts both tails: at most ``100 - percentile`` percent of the values clip at either end.

    The ends are quantiles of a histogram whose values are spread evenly within a bin. They never lie outside
    the smallest and the largest value; 100 gives exactly these.

    Options:
        percentile: 51 to 100; the share of values below the upper end, and above the lower end.
    """

    class Options(HistogramObserver.Options):
        percentile: Annotated[Float, Field(ge=51, le=100)] = 99.99

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        counts, size = state["counts"], state["counts"].shape[1]
        # Rounded, so that 0.01 percent of 10000 is exactly 1: slightly less would keep the extreme value.
        tail = np.round(counts.sum(axis=1) * ((100.0 - self._options["percentile"]) / 100.0), 6)
        origin = origin_of(state["lo"], state["exponent"])
        width = np.ldexp(1.0, state["exponent"])
        lo = (origin + _depth(counts, tail)) * width
        hi = (origin + size - _depth(counts[:, ::-1], tail)) * width
        lo64, hi64 = state["lo"].astype(np.float64), state["hi"].astype(np.float64)
        return np.clip(lo, lo64, hi64), np.clip(hi, lo64, hi64)


def _depth(counts: np.ndarray, tail: np.ndarray) -> np.ndarray:
    """Counts the bins (with a fraction) from the left that hold ``tail`` values of a channel, shape (C,)."""
    passed = np.cumsum(counts, axis=1)
    # The first bin that holds a value beyond the tail; it exists, as a tail is at most half of all values.
    last = np.argmax(passed > tail[:, None], axis=1)
    row = np.arange(len(last))
    inside = counts[row, last]
    return last + (tail - (passed[row, last] - inside)) / inside
