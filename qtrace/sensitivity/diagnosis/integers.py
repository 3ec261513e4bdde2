"""Outputs of integers in a verdict: numbers count like floats, others by the share of equal values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from qtrace.outputs import NO_INFORMATION_DB
from qtrace.sensitivity.diagnosis.samples import JudgedOutputs, measure_differences
from qtrace.sensitivity.diagnosis.verdict import GOOD_EQUAL, GOOD_FROM_DB
from qtrace.sensitivity.metrics import Outputs, integer_errors

__all__ = ["ReadIntegers", "read_integers"]

_LARGEST_SMALL = 2  # bytes of an integer that float32 holds exactly


@dataclass(frozen=True)
class ReadIntegers:
    """What the outputs of integers are.

    Attributes:
        compared: the outputs, in which numbers are floats.
        equal: the share of equal values of the worst output of those that are no numbers; None for none.
        lost_db: the SQNR of what differs between samples of one of these, if it is lost; None if none is.
    """

    compared: JudgedOutputs
    equal: float | None
    lost_db: float | None


def read_integers(compared: JudgedOutputs) -> ReadIntegers:
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
    return ReadIntegers(
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
