"""Weights output noise by how much the output varies between samples.

A box next to the corner of its grid, or a score that one class always has, is a large signal that every
network keeps, whatever its input. Noise that is small compared with it may hide all that the network tells.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

__all__ = ["DIFFERING_MARGIN_DB", "FEWEST_SAMPLES", "LEAST_VARIATION", "noise_weight"]

DIFFERING_MARGIN_DB = 7.0
"""What differs between samples is as good as the whole with this many dB less."""
FEWEST_SAMPLES = 4
"""The fewest samples whose differences predict the differences of others."""
LEAST_VARIATION = 1e-8
"""The share of the power below which samples are called equal."""


def noise_weight(parts: Iterable[np.ndarray], counts: Iterable[int]) -> float:
    """Returns how many times more the noise of some values counts than their power says: once, or more.

    Args:
        parts: the values of each batch. If their first axis does not count the samples, they are one sample.
        counts: the number of samples of each batch.

    Returns:
        The power divided by the power of the differences from the mean of each place over all samples, as it
        is expected of other samples, less `DIFFERING_MARGIN_DB`. 1 for fewer than four samples, for samples
        of unlike sizes, and for equal ones. Values that are not finite count as 0.
    """
    power, number, alike = 0.0, 0, True
    total: np.ndarray | None = None
    for part, count in zip(parts, counts, strict=True):
        rows = count if part.ndim and len(part) == count else 1
        values = part.reshape(rows, -1).astype(np.float64)
        values[~np.isfinite(values)] = 0.0
        power, number, own = power + float(np.square(values).sum()), number + rows, values.sum(axis=0)
        alike = alike and (total is None or total.shape == own.shape)
        total = own if total is None or not alike else total + own
    if total is None or not alike or number < FEWEST_SAMPLES:
        return 1.0
    variation = (power - float(np.square(total).sum()) / number) * number / (number - 1)
    if variation <= LEAST_VARIATION * power:
        return 1.0
    return max(1.0, power / variation / 10.0 ** (DIFFERING_MARGIN_DB / 10))
