"""The error of each sample: how far the figure of a few samples may be off, and the sample that lost most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special

from qtrace.metrics import comparable, decibels, errors_of
from qtrace.outputs import ColumnGroup
from qtrace.outputs.counted import FEWEST_SAMPLES, LEAST_VARIATION
from qtrace.sensitivity.metrics import Outputs

__all__ = ["ENOUGH_SAMPLES", "JudgedOutputs", "SampleErrors", "measure_differences", "measure_samples"]

ENOUGH_SAMPLES = 8
"""Fewer samples do not speak for others: figures of one, two and four were 82, 37 and 28 dB too high."""
_CONFIDENCE = 0.975  # of the error of a mean: two standard errors of many samples
_TWO = 1.5  # effective samples, below which one has nearly all of the signal
_QUIET = 0.03  # of the mean signal: quieter samples are compared with this
_LEAST_VALUES = 64  # of a sample, from which its own signal is its measure: one of few values may be near 0


@dataclass(frozen=True)
class JudgedOutputs:
    """Outputs beside those of float.

    Attributes:
        groups: the column groups of the outputs.
        reference: for each batch the float outputs.
        outputs: the outputs in their place.
        counts: the number of samples of each batch. An output whose first axis does not count them is one
            sample a batch.
        repeated: for each batch which of its samples were there before, and count no more; () for none.
        one_number: whether each input of the samples is one number everywhere.
        rows: the share of selected rows that float selects, too; None if nothing selects.
        read: the share of the samples that the calibration has read.
        rounded: whether anything is rounded at all; if not, no sample can show noise.
    """

    groups: Sequence[ColumnGroup]
    reference: Outputs
    outputs: Outputs
    counts: Sequence[int]
    repeated: Sequence[Sequence[bool]] = ()
    one_number: bool = False
    rows: float | None = None
    read: float = 0.0
    rounded: bool = True

    def count_new(self) -> int:
        """Returns the number of samples that the calibration has not read, each counted once."""
        again = sum(map(sum, self.repeated))
        return round((sum(self.counts) - again) * (1.0 - self.read))


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

    def sqnr_db(self) -> float:
        """Returns the SQNR of all samples together in dB."""
        return decibels(float(self.signal.sum()), float(self.noise.sum()))

    def low_db(self) -> float:
        """Returns the SQNR in dB that other samples may have.

        It is below that of these by the error of their mean at 97.5 % (Student's t). Samples count by their
        signal. One sample has no such error: see `rests_on_one`.
        """
        signal, noise = float(self.signal.sum()), float(self.noise.sum())
        if not math.isfinite(noise) or noise == 0.0 or signal == 0.0:
            return decibels(signal, noise)
        count, ratio = len(self.signal), noise / signal
        if count > 1:
            spread = np.sqrt(np.sum((self.noise - ratio * self.signal) ** 2) * count / (count - 1)) / signal
            freedom = max(self._effective - 1.0, 1.0)
            ratio += float(special.stdtrit(freedom, _CONFIDENCE)) * float(spread)
        return decibels(1.0, ratio)

    @property
    def _effective(self) -> float:
        """Kish's size of a weighted sample."""
        return float(self.signal.sum()) ** 2 / float(np.square(self.signal).sum())

    @property
    def rests_on_one(self) -> bool:
        """Whether there is noise, and one sample has nearly all of the signal."""
        return bool(self.noise.any()) and self._effective < _TWO

    def worst_db(self) -> float:
        """Returns the SQNR of the worst sample in dB; a quiet one counts by a share of the mean signal."""
        mean = float(self.signal.mean())
        least = mean * (_QUIET if self.values >= _LEAST_VALUES else 1.0)
        pairs = zip(self.signal.tolist(), self.noise.tolist(), strict=True)
        return min(decibels(max(signal, least), noise) for signal, noise in pairs)


def measure_samples(compared: JudgedOutputs) -> list[SampleErrors]:
    """Measures the samples of each group that has a signal and values to compare."""
    measured = []
    for group in compared.groups:
        parts = [_sums(samples) for samples in _read_samples(group, compared)]
        if parts:
            signal, noise = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
            if signal.size and signal.sum() > 0:
                measured.append(SampleErrors(signal, noise, parts[0][2]))
    return measured


def measure_differences(compared: JudgedOutputs) -> tuple[list[SampleErrors], bool]:
    """Measures what differs between samples: each value without the mean of its place over all samples.

    A box beside the corner of its grid, or a score that one class always has, is a large signal that every
    network keeps, whatever its input: an error beside it looks small.

    Returns:
        The errors of each group whose values differ between samples, of four samples or more, none of a group
        whose batches have unlike sizes; and whether no group differs, by more than floats are rounded.
    """
    measured, alike = [], bool(compared.groups)
    for group in compared.groups:
        means = _means(_read_samples(group, compared))
        if means is None:
            alike = False
            continue
        # Read again: the values of all batches at once, in float64, would take the memory of many of them.
        parts = list(map(means.without, _read_samples(group, compared)))
        signal, noise = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        if signal.sum() > LEAST_VARIATION * means.power:
            measured.append(SampleErrors(signal, noise, len(means.reference)))
    return measured, alike and not measured


class _Means(NamedTuple):
    """The mean of each place over all samples, of float's values and of the differences; float's squares."""

    reference: np.ndarray
    error: np.ndarray
    power: float

    def without(self, samples: _Samples) -> tuple[np.ndarray, np.ndarray]:
        """Returns the squares of each sample without these means."""
        f, e = samples.reference - self.reference, samples.error - self.error
        return np.square(f).sum(axis=1), np.square(e).sum(axis=1)


def _means(parts: Iterable[_Samples]) -> _Means | None:
    """Returns the means of four or more samples of one size that are finite on both sides; None of others."""
    count, power = 0, 0.0
    f_sum = e_sum = np.zeros(0)
    for part in parts:
        if part.lost.any() or (count and len(f_sum) != part.reference.shape[1]):
            return None
        f, e = part.reference.sum(axis=0), part.error.sum(axis=0)
        f_sum, e_sum = (f_sum + f, e_sum + e) if count else (f, e)
        count, power = count + len(part.reference), power + float(np.square(part.reference).sum())
    return _Means(f_sum / count, e_sum / count, power) if count >= FEWEST_SAMPLES else None


class _Samples(NamedTuple):
    """The samples of one batch in a column group, in float64; 0 where a value is not finite.

    Attributes:
        reference: float's values, a row for each sample.
        error: the differences of the values in their place.
        lost: whether a sample has values that are not finite on one side alone.
    """

    reference: np.ndarray
    error: np.ndarray
    lost: np.ndarray


def _read_samples(group: ColumnGroup, compared: JudgedOutputs) -> Iterator[_Samples]:
    """Yields the samples of each batch that has values to compare, without those that come again.

    Values that are not finite count as in `qtrace.metrics.ErrorSums`.
    """
    flags = compared.repeated or [()] * len(compared.counts)
    batches = zip(compared.reference, compared.outputs, compared.counts, flags, strict=True)
    for exact, rounded, count, same in batches:
        f, q = exact[group.output], rounded[group.output]
        if not comparable(f, q) or not f.size:
            continue
        f, q = group.select(f), group.select(q)
        rows = count if f.ndim and len(f) == count else 1
        f, q = (value.reshape(rows, -1).astype(np.float64) for value in (f, q))
        errors = errors_of(f, q)
        lost = np.isinf(errors)
        f = np.where(np.isfinite(f) & ~lost, f, 0.0)
        first = ~np.array(same, bool) if len(same) == rows else np.ones(rows, bool)
        yield _Samples(f[first], np.where(lost, 0.0, errors)[first], lost.any(axis=1)[first])


def _sums(samples: _Samples) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns signal and noise of each sample, and the number of values of one."""
    noise = np.square(samples.error).sum(axis=1)
    signal = np.square(samples.reference).sum(axis=1)
    return signal, np.where(samples.lost, math.inf, noise), samples.reference.shape[1]
