"""The range whose quantized histogram has the least relative entropy to the observed one."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from qtrace.numerics import grid
from qtrace.observers.base import State
from qtrace.observers.statistics import HistogramObserver, Tables, by_channels, observed, running, tables
from qtrace.plugins.options import Int
from qtrace.scheme import QScheme

__all__ = ["KullbackLeibler"]

# With fewer values per level, a channel lacks a distribution whose shape could be kept.
_MIN_VALUES_PER_LEVEL = 4


class KullbackLeibler(HistogramObserver):
    """Clips where the quantized distribution stays closest to the observed one, like TensorRT.

    Migacz 2017, "8-bit Inference with TensorRT" (GTC, S7310). For a range, P is the histogram with
    all clipped values in the last bins of the range. Q is the histogram inside the range, each cell of the
    quantizer spread evenly over its bins that are not empty. The range with the smallest ``KL(P || Q)``
    wins. A bin belongs to the level that its middle is rounded to.

    The original is extended. Affine schemes are searched at both ends (together, then singly), and symmetric
    ones keep both signs apart. Exact zeros do not count, since they make no error. Ranges whose levels lie
    closer than the bins are not tried, so that 12 bits and more keep the whole range. Channels with fewer
    than 4 nonzero values per level keep it, too. If nearly every value has a bin of its own, Q equals P
    whatever is clipped, and the channels of a depthwise weight would lose their largest values.

    Relative entropy compares shapes and ignores magnitudes: at 8 bits it clips large values that matter to
    detectors, and ``mse`` is the better default.

    Options:
        candidates: number of ranges that a sweep tries, evenly spaced.
    """

    class Options(HistogramObserver.Options):
        candidates: Annotated[Int, Field(ge=8, le=8192)] = 512

    def _choose_range(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        candidates = self._options["candidates"]
        return by_channels(state, self._scheme, candidates, lambda part: self._search(part, candidates))

    def _search(self, state: State, candidates: int) -> np.ndarray:
        """Returns the best range of each channel in ``state``, float64 (2, C)."""
        table, scheme = tables(state), self._scheme
        best = full = observed(state)
        if scheme.qmax - scheme.qmin > table.mass.shape[1]:
            return full[:, :, 0]
        # From the whole range to the one whose levels are a bin apart.
        smallest_ratio = np.minimum(table.width / grid(full[0], full[1], scheme)[0], 1.0)
        ratio = 1.0 - (1.0 - smallest_ratio) * np.linspace(0.0, 1.0, candidates)
        sweeps: tuple[tuple[int, ...], ...] = ((0, 1),)
        if not scheme.symmetric and full[0].any() and full[1].any():
            sweeps = ((0, 1), (0,), (1,))
        for moved in sweeps:
            lo, hi = (
                full[end] * ratio if end in moved else np.broadcast_to(best[end], ratio.shape)
                for end in (0, 1)
            )
            if len(moved) == 1:  # the best range so far comes first, so that it wins a tie
                lo, hi = (np.concatenate([old, new], axis=1) for old, new in zip(best, (lo, hi), strict=True))
            winner = np.argmin(divergence(table, lo, hi, scheme), axis=1)[:, None]
            best = np.stack([np.take_along_axis(end, winner, axis=1) for end in (lo, hi)])
        sparse = table.moments[0] < _MIN_VALUES_PER_LEVEL * (scheme.qmax - scheme.qmin + 1)
        return np.where(sparse, full, best)[:, :, 0]


def divergence(table: Tables, lo: np.ndarray, hi: np.ndarray, scheme: QScheme) -> np.ndarray:
    """Computes ``KL(P || Q)`` (see `KullbackLeibler`), in nats, of the quantizers that `choose` makes.

    T is the whole mass, and S the mass inside. A cell c has the mass s_c inside, the mass p_c with clipped
    values, and n_c bins that are not empty in P::

        KL = (sum_b P_b log P_b - sum_c p_c log(s_c / n_c)) / T - log T + log S

    so that running sums over the bins give it for all ranges at once.

    Args:
        table: the tables of C channels.
        lo, hi: float64 (C, K), K candidates for each channel.
        scheme: the scheme of the quantizers.

    Returns:
        float64 (C, K); infinite where Q is 0 and P is not, and where levels lie closer than the bins.
    """
    scale, zero_point = grid(lo, hi, scheme)
    step = scale.astype(np.float64) / table.width
    index = np.arange(scheme.qmin, scheme.qmax + 2) - 0.5
    ends = (index - zero_point[..., None]) * step[..., None] - table.origin[..., None] - 0.5
    size = table.mass.shape[1]
    row = size * np.arange(len(step))[:, None, None]
    edge = np.clip(np.ceil(ends), 0, size - 1).astype(np.intp)
    below = np.take(table.f, edge + row)
    occupied = running(table.mass > 0)
    inside, bins = np.diff(below), np.diff(np.take(occupied, edge + row)).astype(np.float64)
    total = table.moments[0]
    clipped = np.stack([below[..., 0], total - below[..., -1]], axis=-1)
    last = np.stack([edge[..., 0], np.maximum(edge[..., -1] - 1, 0)], axis=-1)
    end_mass = np.take(table.mass, last + row)
    with_clipped = inside.copy()
    with_clipped[..., 0] += clipped[..., 0]
    with_clipped[..., -1] += clipped[..., 1]
    newly = (clipped > 0) & (end_mass == 0)
    bins[..., 0] += newly[..., 0]
    bins[..., -1] += newly[..., 1]
    entropy = np.diff(np.take(running(_xlogx(table.mass)), edge[..., [0, -1]] + row))[..., 0]
    entropy += (_xlogx(end_mass + clipped) - _xlogx(end_mass)).sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cross = np.where(with_clipped > 0, with_clipped * np.log(inside / bins), 0.0).sum(axis=-1)
        result = (entropy - cross) / total + np.log(inside.sum(axis=-1) / total)
    result = np.where(total > 0, result, 0.0)
    return np.where(np.isnan(result) | (step < 1.0), np.inf, result)


def _xlogx(x: np.ndarray) -> np.ndarray:
    """Computes ``x log x``, which is 0 at 0."""
    return np.where(x > 0, x * np.log(np.maximum(x, np.finfo(np.float64).tiny)), 0.0)
