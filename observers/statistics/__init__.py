"""Statistics that observers share: histograms, the search for a range in one, and moments.

Bins are ``[i * 2**k, (i + 1) * 2**k)`` for integers i: a grid fixed at 0. The exponent k is the smallest at
which the observed range, widened to 0, touches at most ``2 * bins`` of them. So it depends only on the
smallest and the largest value. Adding pairs of bins (``i // 2``) gives the same counts as counting on the
coarser grid. So the state depends on the set of values only, not on their order or sharding.

Let mu be the histogram's measure (counts spread evenly within a bin). Let F(t) be its mass below t, G the
integral of F, and A the integral of 2 G. So ``G(t) = int_{x<t} (t - x) dmu`` and
``A(t) = int_{x<t} (t - x)**2 dmu``.
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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field

from qtrace.numerics import grid
from qtrace.observers.base import Layout, Observer, State
from qtrace.plugins.options import Int, OptionModel
from qtrace.scheme import QScheme

__all__ = [
    "OCTAVES",
    "Criterion",
    "HistogramObserver",
    "Moments",
    "Tables",
    "best_range",
    "by_channels",
    "dissimilarity",
    "error",
    "g_at",
    "moments",
    "observed",
    "origin_of",
    "running",
    "tables",
]


# A histogram that merges exactly and in any order.

# A sample keeps at least this many values of a channel and batch, so that percentiles keep some beyond them.
_MIN_SAMPLED_VALUES = 1 << 14

# 2**-k must be a float32. Scales are far larger (`numerics.SMALLEST_SCALE`).
_LOWEST_EXPONENT = int(np.finfo(np.float32).minexp)
# Elements, drawn positions or counters per block: the temporaries of a block stay in the cache.
_BLOCK_ELEMENTS = 1 << 16
# Elements that are counted in int32.
_INT32_ELEMENTS = int(np.iinfo(np.int32).max)
# Neighbours count in different lanes; otherwise runs of one value (zeros after ReLU) wait for each other.
_LANES = 4


class HistogramObserver(Observer):
    """Abstract: counts values, all or a random sample; the smallest and the largest are of all values.

    The state, for C channels and N = 2 * bins::

        lo, hi    float32 (C,)    the smallest and the largest value
        exponent  int64 (C,)      k, bins being 2**k wide
        zeros     int64 (C,)      the number of exact zeros, which quantize without error
        counts    int64 (C, N)    from the bin of min(lo, 0) on

    Options:
        bins: the histogram has `bins` to ``2 * bins`` bins.
        sample: the number of values of which one is counted, if a batch has enough values.
    """

    class Options(OptionModel):
        bins: Annotated[Int, Field(ge=64, le=65536)] = 2048
        sample: Annotated[Int, Field(ge=1, le=1024)] = 1

    def _layout(self) -> Layout:
        size = 2 * self._options["bins"]
        return {
            "lo": (np.float32, ("C",)),
            "hi": (np.float32, ("C",)),
            "exponent": (np.int64, ("C",)),
            "zeros": (np.int64, ("C",)),
            "counts": (np.int64, ("C", size)),
        }

    def _measure(self, x: np.ndarray, lo: np.ndarray, hi: np.ndarray, batch: int) -> State:
        size = 2 * self._options["bins"]
        exponent = _exponent(lo, hi, size)
        x = _sampled(x, self._options.get("sample", 1), batch)
        count = _count_tensor if x.shape[1] == 1 else _count_channels
        counts, zeros = count(x, exponent, origin_of(lo, exponent), size)
        return {"lo": lo, "hi": hi, "exponent": exponent, "zeros": zeros, "counts": counts}

    def _combine(self, first: State, second: State) -> State:
        lo, hi = np.minimum(first["lo"], second["lo"]), np.maximum(first["hi"], second["hi"])
        if np.array_equal(lo, first["lo"]) and np.array_equal(hi, first["hi"]):
            exponent, origin = first["exponent"], origin_of(lo, first["exponent"])  # the case of most batches
        else:
            exponent = _exponent(lo, hi, first["counts"].shape[1])
            origin = origin_of(lo, exponent)
        counts = _regrid(first, exponent, origin) + _regrid(second, exponent, origin)
        zeros = first["zeros"] + second["zeros"]
        return {"lo": lo, "hi": hi, "exponent": exponent, "zeros": zeros, "counts": counts}


def _sampled(x: np.ndarray, every: int, seed: int) -> np.ndarray:
    """Draws a stratified sample, one value of each ``every``, from (A, C, B) as (1, C, n).

    Channels share positions, so that their correlation stays. The seed is the batch's index: a batch gives
    the same sample in each worker.
    """
    size = x.shape[0] * x.shape[2]
    every = min(every, size // _MIN_SAMPLED_VALUES)
    if every < 2:
        return x
    count = size // every
    offsets = np.arange(0, count, _BLOCK_ELEMENTS)[:, None] * every
    positions = (offsets + _positions(every, seed)).reshape(-1)[:count]
    if x.shape[1] == 1:
        return x.reshape(-1)[positions].reshape(1, 1, -1)
    return np.ascontiguousarray(x[positions // x.shape[2], :, positions % x.shape[2]].T)[None]


@lru_cache(maxsize=16)
def _positions(every: int, seed: int) -> np.ndarray:
    """Draws one of each ``every`` positions, int64; cached, since drawing takes longer than counting."""
    offsets = np.random.default_rng(seed).integers(0, every, _BLOCK_ELEMENTS, dtype=np.uint16)
    return np.arange(0, _BLOCK_ELEMENTS * every, every) + offsets


def origin_of(lo: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """Returns the index of the first bin of the counts, which holds ``min(lo, 0)``: int64 (C,)."""
    return _bin_of(np.minimum(lo, 0.0), exponent)


def _bin_of(x: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    # In float64, where the product with 2**-k is exact for every float32.
    return np.floor(np.ldexp(x.astype(np.float64), -exponent)).astype(np.int64)


def _exponent(lo: np.ndarray, hi: np.ndarray, size: int) -> np.ndarray:
    """Finds the smallest k at which ``[min(lo, 0), max(hi, 0)]`` touches at most `size` bins, int64 (C,)."""
    lo, hi = np.minimum(lo, 0.0).astype(np.float64), np.maximum(hi, 0.0).astype(np.float64)
    # frexp: 2**(e - 1) <= range / size, so bins of 2**(e - 2) are too narrow: start there and go up.
    start = np.where(hi > lo, np.frexp((hi - lo) / size)[1] - 2, _LOWEST_EXPONENT)
    exponent = np.maximum(start, _LOWEST_EXPONENT).astype(np.int64)
    while (wide := _bin_of(hi, exponent) - _bin_of(lo, exponent) >= size).any():
        exponent += wide
    return exponent


def _regrid(state: State, exponent: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Adds the counts of a state up to coarser or equal bins that begin at `origin`."""
    counts = state["counts"]
    old_origin = origin_of(state["lo"], state["exponent"])
    channels, size = counts.shape
    if np.array_equal(exponent, state["exponent"]):
        if np.array_equal(origin, old_origin):
            return counts
        if channels == 1:
            return _shift_right(counts, int(old_origin[0] - origin[0]))
    shift = np.minimum(exponent - state["exponent"], 62)[:, None]  # further shifts of an int64 change empty
    new = ((old_origin[:, None] + np.arange(size)) >> shift) - origin[:, None]
    # Bins past the end are empty: they lie beyond the largest value.
    new = np.minimum(new, size - 1) + size * np.arange(channels)[:, None]
    result = np.zeros(channels * size, np.int64)
    np.add.at(result, new.ravel(), counts.ravel())
    return result.reshape(channels, size)


def _shift_right(counts: np.ndarray, bins: int) -> np.ndarray:
    """Moves the counts of one channel right; the last ``bins`` counts are 0 and drop out."""
    result = np.zeros_like(counts)
    result[:, bins:] = counts[:, : counts.shape[1] - bins]
    return result


def _precision(exponent: np.ndarray, origin: np.ndarray) -> type:
    """Returns the float type in which values times 2**-k have the right floor.

    Scaling down may underflow, and -0.0 has another floor than a tiny negative number. Scaling up cannot
    underflow, and positive values have floor 0 either way.
    """
    return np.float32 if ((exponent <= 0) | (origin >= 0)).all() else np.float64


def _count_tensor(
    x: np.ndarray, exponent: np.ndarray, origin: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Counts x of shape (A, 1, B) per bin: counts (1, size) and zeros (1,)."""
    x, dtype = x.reshape(-1), _precision(exponent, origin)
    length = min(_BLOCK_ELEMENTS, x.size)
    factor, first, lanes = dtype(np.ldexp(1.0, -int(exponent[0]))), dtype(origin[0]), _lanes(size)
    scaled: np.ndarray = np.empty(length, dtype)
    bins = np.empty(length, np.int32)
    is_zero = np.empty(length, np.bool_)
    counts, zeros = np.zeros(_LANES * size, np.int64), 0
    for start in range(0, x.size, _INT32_ELEMENTS):
        piece = np.zeros(_LANES * size, np.int32)
        for position in range(start, min(start + _INT32_ELEMENTS, x.size), length):
            block = x[position : position + length]
            n = block.size
            np.multiply(block, factor, out=scaled[:n], dtype=dtype)  # numpy 1 ignores the dtype of a scalar
            if first:  # with negative values, a cast to integers is no floor
                np.floor(scaled[:n], out=scaled[:n])
                np.subtract(scaled[:n], first, out=scaled[:n])
            np.copyto(bins[:n], scaled[:n], casting="unsafe")
            np.add(bins[:n], lanes[:n], out=bins[:n])
            _tally(bins[:n], piece)
            zeros += np.count_nonzero(np.equal(block, 0, out=is_zero[:n]))
        counts += piece
    return counts.reshape(_LANES, size).sum(axis=0)[None], np.array([zeros], np.int64)


@lru_cache(maxsize=8)
def _lanes(size: int) -> np.ndarray:
    """Returns the offsets that give each lane of a block its own counters; shared, so not to be changed."""
    return (np.arange(_BLOCK_ELEMENTS) % _LANES * size).astype(np.int32)


def _tally(bins: np.ndarray, counts: np.ndarray) -> None:
    """Adds to ``counts`` how often each index is in ``bins``; both int32 and contiguous.

    This is the first half of scipy's selection of columns, applied to a matrix without rows. It takes a third
    of the time of numpy.bincount, which finds the largest index first and counts in 64 bits. For 2**18 bins
    it takes 0.2 ms. The public ways take 2.2 times (a csc_array of ones times one), 3.4 times
    (numpy.bincount) and 90 times (numpy.add.at) as long.
    """
    # Imported here, as the import takes a sixth of a second.
    from scipy.sparse._sparsetools import csr_column_index1

    empty = np.zeros(1, np.int32)
    csr_column_index1(bins.size, bins, 0, 0, empty, empty, counts, empty)


def _count_channels(
    x: np.ndarray, exponent: np.ndarray, origin: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Counts x of shape (A, C, B) per channel and bin: counts (C, size) and zeros (C,)."""
    dtype = _precision(exponent, origin)
    factor: np.ndarray = np.ldexp(1.0, -exponent).astype(dtype)[:, None]
    counts = np.zeros((x.shape[1], size), np.int64)
    zeros = np.zeros(x.shape[1], np.int64)
    for rows, channels in _blocks(x.shape, max(1, _BLOCK_ELEMENTS // size)):
        block = x[rows, channels]
        row = size * np.arange(block.shape[1]) - origin[channels]
        bins = np.floor(block * factor[channels]).astype(np.int32)
        bins += row.astype(np.int32)[:, None]
        block_counts = np.zeros((block.shape[1], size), np.int32)
        _tally(bins.reshape(-1), block_counts.reshape(-1))
        counts[channels] += block_counts
        zeros[channels] += np.count_nonzero(block == 0, axis=(0, 2))
    return counts, zeros


def _blocks(shape: tuple[int, ...], max_channels: int) -> Iterator[tuple[slice, slice]]:
    """Yields slices of the first two axes of (A, C, B), for blocks of about `_BLOCK_ELEMENTS`."""
    height, width, depth = shape
    wide = max(1, min(width, _BLOCK_ELEMENTS // depth, max_channels))
    high = max(1, _BLOCK_ELEMENTS // (wide * depth))
    for channel in range(0, width, wide):
        for row in range(0, height, high):
            yield slice(row, row + high), slice(channel, channel + wide)


# The squared error of a quantizer in closed form from a histogram, and the search for the best range.

# More levels than this are treated as uniform noise.
_MAX_EXACT_LEVELS = 1 << 10
# With fewer levels the rounded zero point makes many local minima: all pairs of both ends are swept.
_MIN_LEVELS_FOR_SEPARATE_SWEEPS = 1 << 6
# The first sweep shrinks the range by this many octaves: to 8 or 16 of 2048 bins.
OCTAVES = 8
# Look-ups in one call of the criterion, so that its arrays stay in the cache.
_LOOKUPS = 1 << 17

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
    group = max(1, _LOOKUPS // look_ups)
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

    pace = OCTAVES / candidates
    shrink = np.exp2(-pace * np.arange(candidates))
    if scheme.symmetric or not full[0].any() or not full[1].any():
        best = sweep(shrink, shrink)
        for step in (pace / 8.0, pace / 64.0):
            around = np.exp2(step * np.arange(8, -9, -1))
            best = sweep(around, around)
        return best[:, :, 0]

    if scheme.qmax - scheme.qmin < _MIN_LEVELS_FOR_SEPARATE_SWEEPS:
        shrink = np.exp2(-OCTAVES / 24.0 * np.arange(24))
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


# Mean and spread from a histogram: its counts merge exactly, sums of floats do not.


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
