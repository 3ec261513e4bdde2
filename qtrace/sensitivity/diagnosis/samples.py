"""The error of each sample: how far the figure of a few samples may be off, and the sample that lost most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from qtrace.metrics import comparable, decibels
from qtrace.outputs import ColumnGroup
from qtrace.sensitivity.metrics import Outputs

__all__ = ["MANY_SAMPLES", "SampleErrors", "measure_samples", "seen_margin_db"]

MANY_SAMPLES = 64
"""From this number of calibration samples on, their own figure tells more of that of others."""
# How far figures of samples that a graph was calibrated on were above those of others, for data with heavy
# tails: 4 to 35 dB with 8 and 24 samples, 0 to 22 dB with 64.
_SEEN_DB, _SEEN_MANY_DB = 30.0, 10.0
_CONFIDENCE = 0.975
_ONE_DB = 10.0  # that one sample alone may be above others
_TWO = 1.5  # effective samples, below which one counts as if it were alone
_QUIET = 0.03  # of the mean signal: quieter samples are compared with this
_LEAST_VALUES = 64  # of a sample, from which its own signal is its measure: one of few values may be near 0


@dataclass(frozen=True)
class SampleErrors:
    """Signal and noise of each sample in one column group.

    Attributes:
        signal: the sum of squares of float's values, by sample.
        noise: the sum of squares of the differences, by sample.
        values: the number of values of a sample.
    """

    signal: np.ndarray
    noise: np.ndarray
    values: int

    def low_db(self) -> float:
        """Returns the SQNR in dB that other samples may have.

        It is below that of these by the error of their mean at 97.5 % (Student's t); one sample has none, and
        may be 10 dB above others. Samples count by their signal: where one has nearly all of it, such as the
        only one with an event, it is as if it were alone.
        """
        signal, noise = float(self.signal.sum()), float(self.noise.sum())
        if not math.isfinite(noise) or noise == 0.0 or signal == 0.0:
            return decibels(signal, noise)
        count, ratio = len(self.signal), noise / signal
        effective = signal**2 / float(np.square(self.signal).sum())  # Kish's size of a weighted sample
        if count > 1:
            spread = np.sqrt(np.sum((self.noise - ratio * self.signal) ** 2) * count / (count - 1)) / signal
            freedom = max(effective - 1.0, 1.0)
            ratio += float(special.stdtrit(freedom, _CONFIDENCE)) * float(spread)
        return decibels(1.0, ratio) - (_ONE_DB if effective < _TWO else 0.0)

    def worst_db(self) -> float:
        """Returns the SQNR of the worst sample in dB; a quiet one counts by a share of the mean signal."""
        mean = float(self.signal.mean())
        least = mean * (_QUIET if self.values >= _LEAST_VALUES else 1.0)
        pairs = zip(self.signal.tolist(), self.noise.tolist(), strict=True)
        return min(decibels(max(signal, least), noise) for signal, noise in pairs)


def seen_margin_db(calibrated: int | None) -> float:
    """Returns how far the SQNR of samples that a graph was calibrated on may be above that of others, in dB.

    Args:
        calibrated: the number of samples of the calibration; None if unknown.
    """
    return _SEEN_DB if calibrated is None or calibrated < MANY_SAMPLES else _SEEN_MANY_DB


def measure_samples(
    groups: Sequence[ColumnGroup],
    reference: Outputs,
    outputs: Outputs,
    counts: Sequence[int],
    repeated: Sequence[Sequence[bool]] | None = None,
) -> list[SampleErrors]:
    """Measures the samples of each group that has a signal and values to compare.

    Args:
        groups: the column groups of the outputs.
        reference: for each batch the float outputs.
        outputs: the outputs in their place.
        counts: the number of samples of each batch. An output whose first axis does not count them is one
            sample a batch.
        repeated: for each batch which of its samples are the same as one before, which counts once; None if
            none is.
    """
    firsts = [~np.array(flags, bool) for flags in repeated or [()] * len(counts)]
    measured = []
    for group in groups:
        parts = []
        for exact, rounded, count, first in zip(reference, outputs, counts, firsts, strict=True):
            f, q = exact[group.output], rounded[group.output]
            if comparable(f, q) and f.size:
                f, q = group.select(f), group.select(q)
                signal, noise, values = _sums(f, q, count if f.ndim and len(f) == count else 1)
                if len(first) == len(signal):
                    signal, noise = signal[first], noise[first]
                parts.append((signal, noise, values))
        if parts:
            signal, noise = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
            if signal.size and signal.sum() > 0:
                measured.append(SampleErrors(signal, noise, parts[0][2]))
    return measured


def _sums(reference: np.ndarray, test: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns signal and noise of each sample, and the number of values of one.

    Values that are not finite count as in `qtrace.metrics.ErrorSums`.
    """
    f, q = (value.reshape(count, -1).astype(np.float64) for value in (reference, test))
    finite = np.isfinite(f) & np.isfinite(q)
    lost = (~finite & ~((f == q) | (np.isnan(f) & np.isnan(q)))).any(axis=1)
    f, q = np.where(finite, f, 0.0), np.where(finite, q, 0.0)
    noise = np.square(q - f).sum(axis=1)
    return np.square(f).sum(axis=1), np.where(lost, math.inf, noise), f.shape[1]
