"""The verdict on outputs beside those of float, whatever has computed them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qtrace.metrics import comparable
from qtrace.outputs import ColumnGroup
from qtrace.sensitivity.diagnosis.inputs import are_constant
from qtrace.sensitivity.diagnosis.integers import read_integers
from qtrace.sensitivity.diagnosis.samples import measure_differences, measure_samples
from qtrace.sensitivity.diagnosis.verdict import FAKE_QUANTS, GroupVerdict, Verdict, judge
from qtrace.sensitivity.metrics import Outputs, agreement, column_errors

__all__ = ["JudgedOutputs", "judge_outputs"]


@dataclass(frozen=True)
class JudgedOutputs:
    """Outputs beside those of float.

    Attributes:
        groups: the column groups of the outputs.
        reference: for each batch the float outputs.
        outputs: the outputs in their place.
        counts: the number of samples of each batch.
        repeated: for each batch which of its samples are the same as one before.
        one_number: whether each input of the samples is one number everywhere.
        rows: the share of selected rows that float selects, too; None if nothing selects.
    """

    groups: Sequence[ColumnGroup]
    reference: Outputs
    outputs: Outputs
    counts: Sequence[int]
    repeated: Sequence[Sequence[bool]]
    one_number: bool = False
    rows: float | None = None


def judge_outputs(
    compared: JudgedOutputs,
    measured_on: str,
    values: tuple[float, float] | None = None,
    at_least: float | None = None,
    margin_db: float = 0.0,
    seen: bool = False,
    computed_by: str = FAKE_QUANTS,
) -> Verdict:
    """Returns the verdict on outputs.

    Args:
        compared: the outputs.
        measured_on: what the samples are, in words.
        values: the user's metric of the quantized graph and of the float graph; None without one.
        at_least: the limit for the metric, or for the SQNR in dB.
        margin_db: how far the SQNR may be above that of other samples, in dB.
        seen: whether the samples are those of the calibration.
        computed_by: what has computed the outputs, in words.
    """
    counts, repeated = compared.counts, compared.repeated
    integers = read_integers(compared.groups, compared.reference, compared.outputs, counts, repeated)
    reference, outputs = integers.reference, integers.outputs
    errors = column_errors(reference, outputs, compared.groups)
    first = compared.reference[0][0]
    classes = first.ndim == 2 and first.shape[1] > 1 and comparable(first, outputs[0][0])
    same = agreement(compared.reference, compared.outputs) / 100.0 if classes else None
    by_sample = measure_samples(compared.groups, reference, outputs, counts, repeated)
    differences, alike = measure_differences(compared.groups, reference, outputs, counts, repeated)
    between_db = _lowest([*(errors.sqnr_db() for errors in differences), integers.lost_db])
    exactly = [[v for v in batch if not alike or v.dtype.kind != "f"] for batch in compared.reference]
    constant = not compared.one_number and are_constant(exactly, repeated)
    low_db = _lowest([errors.low_db() - margin_db for errors in by_sample])
    worst_sample_db = _lowest([errors.worst_db() for errors in by_sample])
    quantized, in_float = values or (None, None)
    groups = tuple(map(GroupVerdict.of, errors.errors()))
    lost = any(not group.informative for group in groups)
    uncompared = tuple(index for index, unequal in errors.unequal.items() if unequal == len(reference))
    decibels = errors.sqnr_db() if groups or not uncompared else math.nan
    samples = sum(counts)
    judged = functools.partial(
        judge,
        decibels,
        quantized,
        in_float,
        informative=not lost,
        equal=integers.equal,
        compared=not uncompared,
        rows=compared.rows,
        worst_sample_db=worst_sample_db,
        predictions=None if same is None else (same, samples),
        between_db=between_db,
    )
    word = judged(low_db=low_db, shows_nothing=compared.one_number or constant)
    return Verdict(
        word,
        decibels,
        same,
        quantized,
        in_float,
        samples,
        measured_on,
        at_least,
        groups,
        integers.equal,
        uncompared,
        compared.rows,
        low_db,
        worst_sample_db,
        seen,
        word != judged(),
        compared.one_number,
        constant,
        computed_by,
        between_db=between_db,
        silent=() if compared.one_number or constant else _silent(reference, compared.groups),
    )


def _silent(reference: Outputs, groups: Sequence[ColumnGroup]) -> tuple[tuple[str, float], ...]:
    """Returns the name and the number of each output that is one number everywhere, where others are not.

    Masks, which may well be one value everywhere, are none of them.
    """
    labels = {group.output: group.label for group in groups}
    numbers: list[tuple[str, float]] = []
    for place, batches in enumerate(zip(*reference, strict=True)):
        number = next((float(batch.flat[0]) for batch in batches if batch.size), math.nan)
        several = sum(batch.size for batch in batches) > 1 and batches[0].dtype.kind != "b"
        if several and all(bool(np.all(batch == number)) for batch in batches):
            name = labels.get(place, f"output {place}")
            numbers.append((name if name == f"output {place}" else f"output {name}", number))
    return tuple(numbers) if len(numbers) < len(reference[0]) else ()


def _lowest(figures: Sequence[float | None]) -> float | None:
    """Returns the lowest of some ratios in dB; None if all are infinite."""
    finite = [figure for figure in figures if figure is not None and math.isfinite(figure)]
    return min(finite, default=None)
