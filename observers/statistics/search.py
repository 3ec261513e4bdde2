"""The squared error of a quantizer in closed form from a histogram, and the search for the best range.

Let mu be the histogram's measure (counts spread evenly within a bin), F(t) its mass below t, G the integral
of F, and A that for 2 G, so that ``G(t) = int_{x<t} (t - x) dmu`` and ``A(t) = int_{x<t} (t - x)**2 dmu``.
A quantizer with levels ``v_i = v_0 + i s``, i = 0 ... L, and thresholds ``t_i = v_i + s / 2`` takes x to the
nearest level and beyond the ends to v_0 or v_L. Summing ``int (x - v_i)**2 dmu`` over its cells by parts::

    E = int (x - v_L)**2 dmu - 2 s sum_{i<L} G(t_i)

which includes clipping and takes one table look-up per threshold. (Derived here; G is convex and
piecewise quadratic.) With too many thresholds, the midpoint rule of Euler and Maclaurin gives ::

    2 s sum_{i<L} G(t_i) = A(v_L) - A(v_0) - s**2 / 12 (F(v_L) - F(v_0))

which is Bennett's uniform noise ``s**2 / 12`` inside and the exact error of clipping outside (Bennett 1948,
"Spectra of Quantized Signals").

Lengths are in bins: errors are compared within a channel only. Exact zeros are left out: 0 is a level of
    every
quantizer, so that they make no error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qtrace.numerics import grid
from qtrace.observers.base import State
from qtrace.observers.statistics.histogram import origin_of
from qtrace.scheme import QScheme

__all__ = [
    "Criterion",
    "Tables",
    "best_range",
    "by_channels",
    "dissimilarity",
    "error",
    "g_at",
    "observed",
    "running",
    "tables",
]

# More levels than this are treated as uniform noise.
_MAX_EXACT_LEVELS = 1 << 10
# With fewer levels the rounded zero point makes many local minima: all pairs of both ends are swept.
_MIN_LEVELS_FOR_SEPARATE_SWEEPS = 1 << 6
# The first sweep shrinks the range by this many octaves: to 8 or 16 of 2048 bins.
_OCTAVES = 8.0
# Look-ups and channels in one call of the criterion, so that its arrays stay in the cache.
_LOOKUPS = 1 << 17
_MAX_CHANNELS = 16

# The cost of K ranges (lo and hi, float64 (C, K)) of C channels for a scheme, float64 (C, K).
Criterion = Callable[["Tables", np.ndarray, np.ndarray, QScheme], np.ndarray]


@dataclass(frozen=True)
class Tables:
    """Running sums of a histogram of C channels, from which the error is computed; lengths in bins.

    With an empty bin at either end, whose formula holds to infinity, there are M bins.

    Attributes:
        width: float64 (C, 1), the width of a bin.
        origin: float64 (C, 1), the left end of the first bin.
        moments: float64 (3, C, 1): integrals of 1, x, x**2.
        mass: float64 (C, M), the measure of each bin.
        f, g, a: float64 (C, M): F, G and A at the left end of each bin.
    """

    width: np.ndarray
    origin: np.ndarray
    moments: np.ndarray
    mass: np.ndarray
    f: np.ndarray
    g: np.ndarray
    a: np.ndarray


def tables(state: State) -> Tables:
    """Computes the tables of the state of a `HistogramObserver`."""
    first = origin_of(state["lo"], state["exponent"])
    mass = np.pad(state["counts"].astype(np.float64), ((0, 0), (1, 1)))
    mass[np.arange(len(first)), 1 - first] -= state["zeros"]
    origin = (first - 1.0)[:, None]
    left = origin + np.arange(mass.shape[1])
    second = left * left + left + 1.0 / 3.0  # the mean of x**2 between left and left + 1
    moments = np.stack([mass, mass * (left + 0.5), mass * second]).sum(axis=2)[:, :, None]
    f = running(mass)
    g = running(f + mass / 2.0)
    a = running(2.0 * g + f + mass / 3.0)
    return Tables(np.ldexp(1.0, state["exponent"])[:, None], origin, moments, mass, f, g, a)


def error(table: Tables, lo: np.ndarray, hi: np.ndarray, scheme: QScheme) -> np.ndarray:
    """Sums the squared error of the quantizers that `choose` makes of ranges, in squared bins.

    Args:
        table: the tables of C channels.
        lo, hi: float64 (C, K), K candidates for each channel.
        scheme: the scheme of the quantizers.

    Returns:
        float64 (C, K).
    """
    scale, zero_point = grid(lo, hi, scheme)
    step = scale.astype(np.float64) / table.width
    top = (scheme.qmax - zero_point) * step
    s0, s1, s2 = table.moments
    everything = s2 - 2.0 * top * s1 + top * top * s0
    levels = scheme.qmax - scheme.qmin
    if levels > _MAX_EXACT_LEVELS:
        bottom = (scheme.qmin - zero_point) * step
        (a0, f0), (a1, f1) = _a_and_f(table, bottom), _a_and_f(table, top)
        return everything - (a1 - a0 - step * step / 12.0 * (f1 - f0))
    sum_of_g = g_at(table, _thresholds(step, zero_point, scheme)).reshape(*step.shape, levels).sum(axis=-1)
    return everything - 2.0 * step * sum_of_g


def dissimilarity(table: Tables, lo: np.ndarray, hi: np.ndarray, scheme: QScheme) -> np.ndarray:
    """Computes ``1 - cos(x, Q(x))`` of the quantizers that `choose` makes of ranges.

    With the thresholds t_i of the module's docstring and M(t) the integral of x below t, ``t F(t) - G(t)``::

        <x, Q> = v_0 s_1 + s sum_i (s_1 - M(t_i))        <Q, Q> = v_0**2 s_0 + 2 s sum_i t_i (s_0 - F(t_i))

    Too many levels are treated as clipping with uniform noise ``s**2 / 12``, independent of x. The cosine is
    0 if Q is 0 everywhere, and 1 if x is.

    Args:
        table: the tables of C channels.
        lo, hi: float64 (C, K), K candidates for each channel.
        scheme: the scheme of the quantizers.

    Returns:
        float64 (C, K), in [0, 2].
    """
    scale, zero_point = grid(lo, hi, scheme)
    step = scale.astype(np.float64) / table.width
    bottom, top = (scheme.qmin - zero_point) * step, (scheme.qmax - zero_point) * step
    s0, s1, s2 = table.moments
    levels = scheme.qmax - scheme.qmin
    if levels > _MAX_EXACT_LEVELS:
        (a0, f0), (a1, f1) = _a_and_f(table, bottom), _a_and_f(table, top)
        g0, g1 = g_at(table, bottom), g_at(table, top)
        above = g1 - top * s0 + s1  # the integral of x - top beyond it
        dot = s2 + (bottom * g0 - a0) - (top * above + s2 - 2.0 * top * s1 + top * top * s0 - a1)
        power = dot + bottom * g0 - top * above + step * step / 12.0 * (f1 - f0)
    else:
        threshold = _thresholds(step, zero_point, scheme)
        f, g = _f(table, threshold), g_at(table, threshold)
        shape = (*step.shape, levels)
        dot = bottom * s1 + step * (s1[..., None] - (threshold * f - g).reshape(shape)).sum(axis=-1)
        beyond = (threshold * (s0 - f)).reshape(shape).sum(axis=-1)
        power = bottom * bottom * s0 + 2.0 * step * beyond
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.where(power > 0.0, dot / np.sqrt(power * s2), 0.0)
    return np.where(s2 > 0.0, 1.0 - cosine, 0.0)


def best_range(
    state: State, scheme: QScheme, candidates: int, criterion: Criterion = error
) -> tuple[np.ndarray, np.ndarray]:
    """Searches the range within the observed one that costs least on the histogram.

    First both ends shrink together by `candidates` ratios, at most 256-fold, spaced evenly in their
    logarithm. Then each end shrinks by itself, then both move around the best range so far in ever smaller
    steps. A tie goes to the range that was tried first, which is the wider one.

    Args:
        state: a histogram's state for C channels.
        scheme: the scheme of the quantizers.
        candidates: number of ratios that the first sweep tries.
        criterion: computes the cost of ranges.

    Returns:
        lo and hi, float64 (C,).
    """

    def search(part: State) -> np.ndarray:
        return _zoom(part, scheme, candidates, criterion)

    return by_channels(state, scheme, candidates, search)


def by_channels(
    state: State, scheme: QScheme, candidates: int, search: Callable[[State], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Searches some channels at a time, so that the arrays stay in the cache.

    Args:
        state: a histogram's state for C channels.
        scheme: the scheme of the quantizers.
        candidates: number of ranges that `search` tries in one call.
        search: maps the state of some channels to their ranges, float64 (2, C).

    Returns:
        lo and hi, float64 (C,).
    """
    channels = len(state["lo"])
    levels = scheme.qmax - scheme.qmin
    look_ups = candidates * (levels if levels <= _MAX_EXACT_LEVELS else 2)
    group = min(max(1, _LOOKUPS // look_ups), _MAX_CHANNELS)
    parts = []
    for start in range(0, channels, group):
        parts.append(search({key: array[start : start + group] for key, array in state.items()}))
    lo, hi = np.concatenate(parts, axis=1)
    return lo, hi


def observed(state: State) -> np.ndarray:
    """Returns the observed range, widened to 0, of C channels: float64 (2, C, 1)."""
    ends = np.minimum(state["lo"], 0.0), np.maximum(state["hi"], 0.0)
    return np.stack(ends).astype(np.float64)[:, :, None]


def _zoom(state: State, scheme: QScheme, candidates: int, criterion: Criterion) -> np.ndarray:
    """Runs the sweeps of `best_range` for some channels, float64 (2, C)."""
    table = tables(state)
    best = full = observed(state)

    def sweep(lo_ratio: np.ndarray, hi_ratio: np.ndarray) -> np.ndarray:
        """Returns the best of the ranges that are these multiples (K,) of the best range so far."""
        lo = np.maximum(best[0] * lo_ratio, full[0])
        hi = np.minimum(best[1] * hi_ratio, full[1])
        winner = np.argmin(criterion(table, lo, hi, scheme), axis=1)[:, None]
        return np.stack([np.take_along_axis(end, winner, axis=1) for end in (lo, hi)])

    pace = _OCTAVES / candidates
    shrink = np.exp2(-pace * np.arange(candidates))
    if scheme.symmetric or not full[0].any() or not full[1].any():
        best = sweep(shrink, shrink)
        for step in (pace / 8.0, pace / 64.0):
            around = np.exp2(step * np.arange(8, -9, -1))
            best = sweep(around, around)
        return best[:, :, 0]

    if scheme.qmax - scheme.qmin < _MIN_LEVELS_FOR_SEPARATE_SWEEPS:
        shrink = np.exp2(-_OCTAVES / 24.0 * np.arange(24))
        best = sweep(*_pairs(shrink))
    else:
        best = sweep(shrink, shrink)
        moved, fixed = np.exp2(np.arange(8, -17, -1) / 4.0), np.ones(25)
        best = sweep(moved, fixed)
        best = sweep(fixed, moved)
    for step in (pace, pace / 2.0, pace / 4.0, pace / 8.0):
        best = sweep(*_pairs(np.exp2(step * np.arange(2, -3, -1))))
    return best[:, :, 0]


def _pairs(ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all pairs of ratios as two arrays."""
    return np.repeat(ratios, len(ratios)), np.tile(ratios, len(ratios))


def running(rate: np.ndarray) -> np.ndarray:
    """Sums the columns before each column of (C, M), float64 (C, M)."""
    total = np.zeros(rate.shape, np.float64)
    np.cumsum(rate[:, :-1], axis=1, out=total[:, 1:])
    return total


def _place(table: Tables, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the flat bin indices of points (C, P), and their distances from the left ends of the bins."""
    offset = t - table.origin
    size = table.mass.shape[1]
    bins = np.clip(offset, 0.0, size - 1.0).astype(np.intp)
    offset -= bins
    bins += size * np.arange(len(t))[:, None]
    return bins, offset


def _thresholds(step: np.ndarray, zero_point: np.ndarray, scheme: QScheme) -> np.ndarray:
    """Computes the thresholds between the levels of quantizers (C, K): (C, K * levels), in bins."""
    index = np.arange(scheme.qmin, scheme.qmax) + 0.5
    threshold: np.ndarray = (index - zero_point[..., None]) * step[..., None]
    return threshold.reshape(len(step), -1)


def _f(table: Tables, t: np.ndarray) -> np.ndarray:
    """Evaluates F at points (C, P)."""
    bins, x = _place(table, t)
    return np.take(table.f, bins) + x * np.take(table.mass, bins)


def g_at(table: Tables, t: np.ndarray) -> np.ndarray:
    """Evaluates G at points (C, P)."""
    bins, x = _place(table, t)
    result = np.take(table.mass, bins)
    result *= x / 2.0
    result += np.take(table.f, bins)
    result *= x
    result += np.take(table.g, bins)
    return result


def _a_and_f(table: Tables, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Evaluates A and F at points (C, P)."""
    bins, x = _place(table, t)
    mass, f, g, a = (np.take(part, bins) for part in (table.mass, table.f, table.g, table.a))
    return a + x * (2.0 * g + x * (f + x * mass / 3.0)), f + x * mass
