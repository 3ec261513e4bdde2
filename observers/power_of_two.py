"""The power-of-two scale that quantizes the observed values with the least squared error."""

from __future__ import annotations

import numpy as np

from qtrace.numerics import SMALLEST_NORMAL, grid
from qtrace.observers.base import State
from qtrace.observers.statistics import OCTAVES, HistogramObserver, Tables, error, g_at, observed, tables
from qtrace.scheme import QScheme

__all__ = ["PowerOfTwo"]


class PowerOfTwo(HistogramObserver):
    """Tries every power of two as the scale, each with its best zero point, for the least squared error.

    For targets that shift instead of multiplying (Jain et al. 2019, "Trained Quantization Thresholds for
    Accurate and Efficient Fixed-Point Inference"). With a scheme of
    ``power_of_two``, the range of any observer is widened until its scale is a power of two, at most to the
    double. This observer instead trades clipping against resolution among powers of two, with any scheme.

    The search is complete down to 2**-12 of the scale that covers the observed range. For a scale s, the
    zero point only moves the window of levels, multiples of s. Moving it up by a step changes the squared
    error by ``2 s (G(v_0 + s / 2) - H(v_L + s / 2))``, H being G from above, which grows as the window
    moves. So bisection gives the best zero point (derived here; G as in
    `qtrace.observers.statistics`).

    The range may exceed the observed one by less than its own length, as power-of-two scales require.
    """

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        table, scheme = tables(state), self._scheme
        lo, hi = observed(state)
        widest = grid(lo, hi, scheme.replace(power_of_two=True))[0].astype(np.float64)
        scale = np.maximum(np.ldexp(widest, -np.arange(OCTAVES + 1)), SMALLEST_NORMAL)
        if scheme.symmetric:
            zero_point = np.full(scale.shape, scheme.symmetric_zero_point)
        else:
            zero_point = best_zero_point(table, scale, scheme)
        lo, hi = (scheme.qmin - zero_point) * scale, (scheme.qmax - zero_point) * scale
        if scheme.symmetric:  # the lower end may be a step longer: the upper end determines the scale
            lo = np.maximum(lo, -hi)
        winner = np.argmin(error(table, lo, hi, scheme), axis=1)[:, None]
        low, high = (np.take_along_axis(end, winner, axis=1)[:, 0] for end in (lo, hi))
        return low, high


def best_zero_point(table: Tables, scale: np.ndarray, scheme: QScheme) -> np.ndarray:
    """Finds the zero points of least squared error by bisection.

    Args:
        table: the tables of C channels.
        scale: K scales for each channel, float64 (C, K).
        scheme: an affine scheme.

    Returns:
        int64 (C, K), in ``[qmin, qmax]``; the largest of equally good ones.
    """
    step = scale / table.width
    s0, s1, _ = table.moments
    low = np.full(scale.shape, scheme.qmin)
    high = np.full(scale.shape, scheme.qmax)
    while (low < high).any():
        # A larger zero point moves the window down; it is taken unless the error grows.
        middle = (low + high + 1) // 2
        bottom = (scheme.qmin - middle + 0.5) * step
        top = (scheme.qmax - middle + 0.5) * step
        below, above = g_at(table, bottom), g_at(table, top) - top * s0 + s1
        # The cost of moving the window up, from `middle` to `middle - 1`.
        down = below - above >= 0.0
        low = np.where(down, middle, low)
        high = np.where(down, high, middle - 1)
    return low
