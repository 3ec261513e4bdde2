"""Mean and spread from a histogram: its counts merge exactly, sums of floats do not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qtrace.observers.base import State
from qtrace.observers.statistics.search import g_at, tables

__all__ = ["Moments", "moments"]


@dataclass(frozen=True)
class Moments:
    """Statistics of C channels, values being spread evenly within a bin, each of shape (C,).

    Attributes:
        count: number of values.
        mean: mean of the values.
        deviation: root of the mean of ``(x - centre)**2``.
        absolute: mean of ``|x - centre|``.
    """

    count: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    absolute: np.ndarray


def moments(state: State, *, about_zero: np.ndarray | None = None, zeros: bool = True) -> Moments:
    """Computes the moments of a histogram's state; 0 for channels without values.

    Args:
        state: the state of a `HistogramObserver`.
        about_zero: bool (C,), the channels whose centre is 0 rather than the mean; None for none.
        zeros: whether exact zeros count.
    """
    table = tables(state)
    s0, s1, s2 = table.moments[:, :, 0]
    at_zero = state["zeros"].astype(np.float64) if zeros else np.zeros_like(s0)
    count = s0 + at_zero
    n = np.maximum(count, 1.0)
    mean = s1 / n
    centre = mean if about_zero is None else np.where(about_zero, 0.0, mean)
    variance = (s2 - 2.0 * centre * s1) / n + centre * centre * (count / n)
    # G and its mirror image: the integrals of the distances below and above the centre.
    absolute = 2.0 * g_at(table, centre[:, None])[:, 0] - centre * s0 + s1 + np.abs(centre) * at_zero
    width = table.width[:, 0]
    return Moments(count, mean * width, np.sqrt(np.maximum(variance, 0.0)) * width, absolute / n * width)
