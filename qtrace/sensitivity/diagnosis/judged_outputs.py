"""The verdict on outputs compared with float's, whatever has computed them.

The error of each sample: how far the figure of a few samples may be off, and the sample that lost most.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import special

from qtrace.comparing.groups import ColumnGroup
from qtrace.comparing.selections import LEAST_SHARE
from qtrace.comparing.sums import (
    FEWEST_SAMPLES,
    LEAST_VARIATION,
    NO_INFORMATION_DB,
    Outputs,
    column_errors,
    comparable,
    decibels,
    errors_of,
    integer_errors,
)
from qtrace.data.batches import ENOUGH_SAMPLES
from qtrace.sensitivity.diagnosis.inputs import are_constant
from qtrace.sensitivity.diagnosis.verdict import (
    BROKEN_BELOW_DB,
    DIFFERING_DB,
    GOOD_EQUAL,
    GOOD_FROM_DB,
    Doubt,
    GroupVerdict,
    Verdict,
    judge,
)
from qtrace.sensitivity.metrics import agreement

_CONFIDENCE = 0.975  # of the error of a mean: two standard errors of many samples
_TWO = 1.5  # effective samples, below which one has nearly all of the signal
_QUIET = 0.03  # of the mean signal: quieter samples are compared with this
_LEAST_VALUES = 64  # of a sample, from which its own signal is its measure: one of few values may be near 0


@dataclass(frozen=True)
class JudgedOutputs:
    """Outputs compared with float's.

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
        """Returns the number of samples that the calibration did not read, each counted once."""
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

        It is below their figure by the error of their mean at 97.5 % (Student's t). Samples count by their
        signal. One sample is without such an error: see `rests_on_one`.
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

    A box near the corner of its grid, or a score that one class always has, is a large signal that every
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
        lost: whether a sample has values that are not finite on only one side.
    """

    reference: np.ndarray
    error: np.ndarray
    lost: np.ndarray


def _read_samples(group: ColumnGroup, compared: JudgedOutputs) -> Iterator[_Samples]:
    """Yields the samples of each batch that has values to compare, without those that come again.

    Values that are not finite count as in `qtrace.comparing.sums.ErrorSums`.
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


_FEW_CHANGED = 2  # one changed prediction tells of no share
_FOR_ENOUGH = 4 * ENOUGH_SAMPLES  # samples, a quarter of which is held back


def judge_outputs(
    compared: JudgedOutputs,
    measured_on: str,
    values: tuple[float, float] | None = None,
    at_least: float | None = None,
) -> Verdict:
    """Returns the verdict on outputs.

    Args:
        compared: the outputs.
        measured_on: what the samples are, in words.
        values: the user's metric of the quantized graph and of the float graph; None without one.
        at_least: the limit for the metric, or for the SQNR in dB.
    """
    measured = _Measured.of(compared)
    quantized, in_float = values or (None, None)
    doubts = tuple(d for d in measured.doubts() if quantized is None or not d.lowers)
    selected = compared.rows if quantized is None else None
    wrong = min(_given(selected, measured.equal), default=1.0) < LEAST_SHARE
    word = judge(
        measured.sqnr_db,
        quantized,
        in_float,
        informative=all(group.informative for group in measured.groups) and not wrong,
        doubts=doubts,
    )
    verdict = Verdict(
        word,
        measured.sqnr_db,
        quantized,
        in_float,
        compared.rows,
        min(_given(measured.same, measured.equal), default=None),
        sum(compared.counts),
        measured_on,
        measured.groups,
        doubts,
    )
    return verdict.limited(at_least)


def _given(*figures: float | None) -> list[float]:
    return [figure for figure in figures if figure is not None]


@dataclass(frozen=True)
class _Measured:
    """What was measured on outputs.

    Attributes:
        compared: the outputs; numbers of integers are floats there.
        sqnr_db: the SQNR of the worst column group; NaN if none could be compared.
        groups: the column groups that could be.
        uncompared: the places of the outputs that had other rows than float's in every batch.
        same: the share of samples whose largest output has the same index; None for no scores.
        equal: the share of equal values of the worst output of indices; None if all are equal.
        by_sample: the errors of the samples of each group.
        between_db: the SQNR of what differs between samples, at the worst group; infinity where nothing does.
        constant: whether float gives the same outputs for all samples, which are not all the same.
    """

    compared: JudgedOutputs
    sqnr_db: float
    groups: tuple[GroupVerdict, ...]
    uncompared: tuple[int, ...]
    same: float | None
    equal: float | None
    by_sample: Sequence[SampleErrors]
    between_db: float
    constant: bool

    @classmethod
    def of(cls, compared: JudgedOutputs) -> _Measured:
        """Measures outputs."""
        integers = _read_integers(compared)
        read = integers.compared
        errors = column_errors(read.reference, read.outputs, read.groups)
        first = compared.reference[0][0]
        classes = first.ndim == 2 and first.shape[1] > 1 and comparable(first, read.outputs[0][0])
        differences, alike = measure_differences(read)
        exactly = [[v for v in batch if not alike or v.dtype.kind != "f"] for batch in compared.reference]
        groups = tuple(map(GroupVerdict.of, errors.errors()))
        uncompared = tuple(i for i, unequal in errors.unequal.items() if unequal == len(read.reference))
        return cls(
            compared,
            errors.sqnr_db() if groups or not uncompared else math.nan,
            groups,
            uncompared,
            agreement(compared.reference, compared.outputs) / 100.0 if classes else None,
            integers.equal,
            measure_samples(read),
            _lowest([*(e.sqnr_db() for e in differences), integers.lost_db]),
            not compared.one_number and are_constant(exactly, compared.repeated),
        )

    def doubts(self) -> Iterator[Doubt]:
        """Yields why the figures may not stand for other samples; nothing if nothing is rounded."""
        if not self.compared.rounded:
            return
        yield from self._doubts_of_samples()
        if self.sqnr_db >= GOOD_FROM_DB:
            yield from self._doubts_of_a_good_figure()
        yield from (_doubt("uncompared", place) for place in self.uncompared)
        if not self.compared.one_number and not self.constant:
            yield from _silent(self.compared.reference, self.compared.groups)

    def _doubts_of_samples(self) -> Iterator[Doubt]:
        new = self.compared.count_new()
        if self.compared.one_number:
            yield _doubt("one-number")
        elif new < ENOUGH_SAMPLES:
            count = f"Only {new} sample{'s are' if new > 1 else ' is'}" if new else "No sample is"
            yield _doubt("few-samples", count, _FOR_ENOUGH, ENOUGH_SAMPLES)
        elif any(errors.rests_on_one for errors in self.by_sample):
            yield _doubt("one-sample")
        if self.constant:
            yield _doubt("constant-outputs")

    def _doubts_of_a_good_figure(self) -> Iterator[Doubt]:
        low_db = _lowest([errors.low_db() for errors in self.by_sample])
        worst_db = _lowest([errors.worst_db() for errors in self.by_sample])
        if low_db < GOOD_FROM_DB and self.compared.count_new() >= ENOUGH_SAMPLES:
            yield _doubt("unlike-samples", low_db)
        if worst_db < BROKEN_BELOW_DB:
            yield _doubt("worst-sample", worst_db)
        if self.between_db < DIFFERING_DB:
            between_db = round(self.between_db, 1) + 0.0  # which is no -0.0
            lost = ", which is lost or hardly anything" if between_db < NO_INFORMATION_DB else ""
            yield _doubt("differences", between_db, lost)
        if self.compared.rows is not None and self.compared.rows < GOOD_EQUAL:
            yield _doubt("rows", 1.0 - self.compared.rows)
        samples = sum(self.compared.counts)
        changed = self.same is not None and round((1.0 - self.same) * samples) >= _FEW_CHANGED
        share = min(_given(self.same if changed else None, self.equal), default=1.0)
        if share < GOOD_EQUAL:
            yield _doubt("predictions", 1.0 - share)


_SENTENCES = {
    "one-number": "The inputs are one number everywhere, which shows nothing of others: judge on real ones.",
    "few-samples": "{} new to the calibration, too few to speak for others: give {} samples, or {} others "
    "as evaluation data.",
    "one-sample": "One sample has nearly all of the signal of an output: give more samples like it.",
    "unlike-samples": "Other samples may have {:.1f} dB, as these are few and unlike: give more of them.",
    "worst-sample": "The worst sample has {:.1f} dB: calibrate on more like it, or give a metric.",
    "differences": "What differs between samples has {:.1f} dB{}: give samples less alike, or a metric.",
    "constant-outputs": "Float gives the same outputs for every sample: give samples for which they differ.",
    "rows": "{:.1%} of the selected rows are not float's: give a metric, which says what they cost.",
    "predictions": "{:.1%} of the predictions are not float's: give a metric, which says what they cost.",
    "uncompared": "Output {} has other rows than float's in every batch: give a metric that can.",
    "silent-output": "Output {} is {:g} in all samples, which show nothing of it: give samples with others.",
}


def _doubt(kind: str, *figures: object) -> Doubt:
    return Doubt(kind, _SENTENCES[kind].format(*figures), lowers=kind != "silent-output")


def _silent(reference: Outputs, groups: Sequence[ColumnGroup]) -> Iterator[Doubt]:
    """Yields the name and the number of each output that is one number everywhere, where others are not.

    Masks, which may well be one value everywhere, are none of them.
    """
    labels = {group.output: group.label for group in groups}
    doubts: list[Doubt] = []
    for place, batches in enumerate(zip(*reference, strict=True)):
        number = next((float(batch.flat[0]) for batch in batches if batch.size), math.nan)
        several = sum(batch.size for batch in batches) > 1 and batches[0].dtype.kind != "b"
        if several and all(bool(np.all(batch == number)) for batch in batches):
            name = labels.get(place, f"output {place}").removeprefix("output ")
            doubts.append(_doubt("silent-output", name, number))
    return iter(doubts if len(doubts) < len(reference[0]) else ())


def _lowest(figures: Sequence[float | None]) -> float:
    """Returns the lowest of some ratios in dB; infinity if all are infinite."""
    finite = [figure for figure in figures if figure is not None and math.isfinite(figure)]
    return min(finite, default=math.inf)


@dataclass(frozen=True)
class _Integers:
    """What the outputs of integers are.

    Attributes:
        compared: the outputs, in which numbers are floats.
        equal: the share of equal values of the worst output of those that are no numbers; None for none.
        lost_db: the SQNR of what differs between samples of one of these, if it is lost; None if none is.
    """

    compared: JudgedOutputs
    equal: float | None
    lost_db: float | None


def _read_integers(compared: JudgedOutputs) -> _Integers:
    """Tells numbers, such as counts and pixels, from indices and masks: they are close where few are equal.

    Of indices and masks the share of equal values counts. It says nothing of rare ones, such as the few hits
    of a mask: these are lost if what differs between samples is.
    """
    unequal = [e for e in integer_errors(compared.reference, compared.outputs) if e.equal < 1.0]
    numbers = {e.output for e in unequal if e.sqnr_db >= GOOD_FROM_DB and e.equal < GOOD_EQUAL}
    others = {e.output: e.equal for e in unequal if e.output not in numbers}
    own = [group for group in compared.groups if group.output in others]
    differences, _ = measure_differences(replace(_as_floats(compared, others), groups=own))
    lost = [decibels for e in differences if (decibels := e.sqnr_db()) < NO_INFORMATION_DB]
    return _Integers(
        _as_floats(compared, numbers), min(others.values(), default=None), min(lost, default=None)
    )


def _as_floats(compared: JudgedOutputs, places: Collection[int]) -> JudgedOutputs:
    """Returns the outputs with those at some places as floats."""

    def convert(batches: Outputs) -> Outputs:
        return [[_as_float(v) if i in places else v for i, v in enumerate(batch)] for batch in batches]

    if not places:
        return compared
    return replace(compared, reference=convert(compared.reference), outputs=convert(compared.outputs))


def _as_float(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32 if np.can_cast(value.dtype, np.float32) else np.float64)
