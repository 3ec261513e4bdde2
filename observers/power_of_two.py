"""The power-of-two scale that quantizes what was seen with the least squared error."""

from __future__ import annotations

import numpy as np

from qtrace.numerics import SMALLEST_NORMAL, grid
from qtrace.observers.base import State
from qtrace.observers.statistics.histogram import HistogramObserver
from qtrace.observers.statistics.search import Tables, error, g_at, observed, tables
from qtrace.scheme import QScheme

__all__ = ["PowerOfTwo"]

# How far below the scale that covers everything the search goes.
_OCTAVES = 12


class PowerOfTwo(HistogramObserver):
    """Every power of two as the scale, each with its best zero point: the least squared error of them all.

    For targets that shift instead of multiplying (Jain et al. 2019, "Trained Quantization Thresholds for
    Accurate and Efficient Fixed-Point Inference"). Every observer gives powers of two where the scheme says
    ``power_of_two``: its range is then widened until the scale is one, at most to the double. This one
    knows beforehand and weighs what clips against what is gained; the scheme need not say so.

    The search is complete down to 2**-12 of the scale that covers everything. With a given scale s a zero
    point only moves the window of levels, multiples of s: moving it up by a step changes the squared error
    by ``2 s (G(v_0 + s / 2) - H(v_L + s / 2))``, H being G seen from above, which grows as the window
    moves. So the best zero point is found by halving (derived here; G as in
    `qtrace.observers.statistics.search`).

    The range may end outside what was seen, as power-of-two scales must, by less than its own length.
    """

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        table, scheme = tables(state), self._scheme
        lo, hi = observed(state)
        widest = grid(lo, hi, scheme.replace(power_of_two=True))[0].astype(np.float64)
        scale = np.maximum(np.ldexp(widest, -np.arange(_OCTAVES + 1)), SMALLEST_NORMAL)
        if scheme.symmetric:
            zero_point = np.full(scale.shape, scheme.symmetric_zero_point)
        else:
            zero_point = best_zero_point(table, scale, scheme)
        lo, hi = (scheme.qmin - zero_point) * scale, (scheme.qmax - zero_point) * scale
        if scheme.symmetric:  # the lower end may reach a step further: the upper one says the scale
            lo = np.maximum(lo, -hi)
        winner = np.argmin(error(table, lo, hi, scheme), axis=1)[:, None]
        low, high = (np.take_along_axis(end, winner, axis=1)[:, 0] for end in (lo, hi))
        return low, high


def best_zero_point(table: Tables, scale: np.ndarray, scheme: QScheme) -> np.ndarray:
    """The zero point of least squared error for given scales.

    Args:
        table: C channels.
        scale: float64 (C, K).
        scheme: an affine one.

    Returns:
        int64 (C, K), in ``[qmin, qmax]``; of several the largest one.
    """
    step = scale / table.width
    s0, s1, _ = table.moments
    least = np.full(scale.shape, scheme.qmin)
    most = np.full(scale.shape, scheme.qmax)
    while (least < most).any():
        # A larger zero point moves the window down: to it, unless that makes the error larger.
        middle = (least + most + 1) // 2
        bottom = (scheme.qmin - middle + 0.5) * step
        top = (scheme.qmax - middle + 0.5) * step
        below, above = g_at(table, bottom), g_at(table, top) - top * s0 + s1
        # What going up from `middle` to `middle - 1` costs.
        down = below - above >= 0.0
        least = np.where(down, middle, least)
        most = np.where(down, most, middle - 1)
    return least
