"""The verdict on outputs beside those of float, whatever has computed them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qtrace.metrics import comparable
from qtrace.outputs import NO_INFORMATION_DB, ColumnGroup
from qtrace.sensitivity.diagnosis.inputs import are_constant
from qtrace.sensitivity.diagnosis.samples import (
    ENOUGH_SAMPLES,
    JudgedOutputs,
    SampleErrors,
    measure_differences,
    measure_samples,
)
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
from qtrace.sensitivity.metrics import Outputs, agreement, column_errors, integer_errors

__all__ = ["judge_outputs"]

_FEW_CHANGED = 2  # one changed prediction tells of no share
_LOST_EQUAL = 0.5  # below this share of right rows or indices, more are wrong than right
_LARGEST_SMALL = 2  # bytes of an integer that float32 holds exactly
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
    wrong = min(_given(selected, measured.equal), default=1.0) < _LOST_EQUAL
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
    return value.astype(np.float32 if value.dtype.itemsize <= _LARGEST_SMALL else np.float64)
