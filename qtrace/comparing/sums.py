"""Compares values with their reference: the one SQNR of the package, the cosine and equal classes.

All figures are computed from sums in float64. The sums of several batches add up to the sums of all data. The
signal to quantization noise ratio of a reference f and the values q in its place is
``10 log10(E[f**2] / E[(q - f)**2])`` (Jayant and Noll 1984, "Digital Coding of Waveforms").

A box next to the corner of its grid, or a score that one class always has, is a large signal that every
network keeps, whatever its input. Noise that is small compared with it may hide all that the network tells:
`noise_weight` says how much it counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from qtrace.comparing.groups import ColumnGroup, find_groups
from qtrace.errors import QtraceError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Sums = TypeVar("_Sums", bound="DataclassInstance")

Outputs = Sequence[Sequence[np.ndarray]]
"""For each batch the tensors that the graph gives."""

DIFFERING_MARGIN_DB = 7.0
"""What differs between samples is as good as the whole with this many dB less."""
FEWEST_SAMPLES = 4
"""The fewest samples whose differences predict the differences of others."""
LEAST_VARIATION = 1e-8
"""The share of the power below which samples, and the values of columns, are called equal."""
EQUAL_DB = 60.0
"""From this SQNR on, outputs are as close as those of two float engines, and count as equal."""
NO_INFORMATION_DB = 3.0
"""Below this SQNR a group carries no information: half of the power is noise."""
_CONSTANT = 1e-6  # of the float values' variation


def decibels(signal: float, noise: float) -> float:
    """Returns ``10 log10(signal / noise)`` of two powers.

    Without noise it is infinite, whatever the signal. Without a signal, or with infinite noise, it is minus
    infinity. It is never NaN.
    """
    if noise == 0.0:
        return math.inf
    if signal == 0.0 or not math.isfinite(noise):
        return -math.inf
    return 10.0 * (math.log10(signal) - math.log10(noise))


def inner(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the inner product of two vectors, the same for any number of threads: BLAS splits long sums.

    Args:
        a: float64 (N,).
        b: float64 (N,).
    """
    return float(np.einsum("i,i->", a, b))


def finite_or_none(ratio: float) -> float | None:
    """Returns `ratio` as reports store it: None where it is infinite."""
    return ratio if math.isfinite(ratio) else None


def finite_values(value: Any) -> Any:
    """Returns plain data for JSON: lists for tuples, and None for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_values(item) for item in value]
    return finite_or_none(value) if isinstance(value, float) else value


def add_fields(cls: type[_Sums], sums: Iterable[_Sums]) -> _Sums:
    """Returns the dataclass ``cls`` of sums whose fields are the sums of the fields of ``sums``."""
    parts = list(sums)
    return cls(**{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(cls)})


def errors_of(reference: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Returns ``test - reference`` in float64; equal infinities and NaNs give 0, unequal ones infinity."""
    f, q = reference.astype(np.float64), test.astype(np.float64)
    with np.errstate(invalid="ignore"):
        errors = np.nan_to_num(q - f, nan=np.inf, posinf=np.inf, neginf=-np.inf)
    return np.where((f == q) | (np.isnan(f) & np.isnan(q)), 0.0, errors)


def comparable(reference: np.ndarray, test: np.ndarray) -> bool:
    """Whether an output has an error: its values are floats, and both sides have the same shape."""
    return reference.shape == test.shape and reference.dtype.kind == "f"


def sqnr_db(reference: Any, test: Any) -> float:
    """Computes the signal to quantization noise ratio of `test`, in dB; see `ErrorSums` and `decibels`.

    Args:
        reference: the true values, any shape.
        test: the values in their place, of the same shape.

    Raises:
        QtraceError: when the shapes differ.
    """
    sums = ErrorSums()
    sums.add(np.asarray(reference), np.asarray(test))
    return sums.sqnr_db


@dataclass
class ErrorSums:
    """Sums over a reference f and the values q in its place, in float64; the sums of two sets of batches add.

    Equal values add no noise; this holds for equal infinities and for NaN, which are left out of every sum. A
    value that is finite on one side only, or another infinity, is noise without limit.

    Attributes:
        signal: the sum of ``f**2``.
        power: the sum of ``q**2``.
        product: the sum of ``f * q``.
        noise: the sum of ``(q - f)**2``.
        values: the number of values that were compared.
        classified: the number of samples whose classes were compared.
        agreeing: the number of those samples whose largest value has the same index on both sides.
    """

    signal: float = 0.0
    power: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    values: int = 0
    classified: int = 0
    agreeing: int = 0

    def add(self, reference: np.ndarray, test: np.ndarray, *, classes: bool = False) -> None:
        """Adds two arrays of one batch.

        Args:
            reference: the true values.
            test: the values in their place, of the same shape.
            classes: whether to compare the index of the largest value of each sample, too; arrays without a
                first axis of samples lack it.

        Raises:
            QtraceError: when the shapes differ.
        """
        if reference.shape != test.shape:
            raise QtraceError(f"shapes {reference.shape} and {test.shape} differ: compare like with like.")
        f, q = reference.astype(np.float64).ravel(), test.astype(np.float64).ravel()
        self.values += f.size
        if classes and reference.ndim >= 2 and reference.size:
            rows = (len(reference), -1)
            self.classified += len(reference)
            self.agreeing += int(np.sum(f.reshape(rows).argmax(1) == q.reshape(rows).argmax(1)))
        finite = np.isfinite(f) & np.isfinite(q)
        if not finite.all():
            if not np.array_equal(f[~finite], q[~finite], equal_nan=True):
                self.noise = math.inf
            f, q = f[finite], q[finite]
        self.signal += inner(f, f)
        self.power += inner(q, q)
        self.product += inner(f, q)
        difference = q - f
        self.noise += inner(difference, difference)

    def __add__(self, other: ErrorSums) -> ErrorSums:
        """Merges two sums; commutative, and associative up to the rounding of float64."""
        return add_fields(ErrorSums, (self, other))

    @property
    def sqnr_db(self) -> float:
        """The signal to quantization noise ratio in dB; see `decibels`."""
        return decibels(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        """The cosine of the angle between both, as vectors; 1 where both are 0."""
        norm = math.sqrt(self.signal) * math.sqrt(self.power)
        return self.product / norm if norm else float(self.signal == self.power)

    @property
    def agreement(self) -> float | None:
        """The share of samples with an equal index of the largest value; None if none were compared."""
        return self.agreeing / self.classified if self.classified else None


@dataclass(frozen=True)
class GroupFigures:
    """The error of one column group.

    Attributes:
        group: the group.
        sums: the sums over all values of its columns.
        variation: the sum of the squares of the reference's values minus the mean of their column.
        varying: the same of the values in their place.
        error_variation: the same of the differences.
    """

    group: ColumnGroup
    sums: ErrorSums
    variation: float = 0.0
    varying: float = 0.0
    error_variation: float = 0.0

    @property
    def constant(self) -> bool:
        """Whether the values do not vary within any column, while the reference's values do."""
        varies = self.variation > LEAST_VARIATION * self.sums.signal
        return varies and self.varying <= _CONSTANT * self.variation

    @property
    def variation_db(self) -> float:
        """The ratio of the reference's variation within columns to the error's variation, in dB."""
        return decibels(self.variation, self.error_variation)

    @property
    def sqnr_db(self) -> float:
        """The signal to quantization noise ratio in dB; of the variation where nothing of it is left."""
        return min(self.sums.sqnr_db, self.variation_db) if self.constant else self.sums.sqnr_db

    @property
    def informative(self) -> bool:
        """Whether the values tell something of the reference: they vary, and noise is below the signal."""
        return not self.constant and self.sqnr_db >= NO_INFORMATION_DB


class GroupedErrors:
    """Errors of the groups of all outputs, added up over batches.

    Args:
        groups: the groups, as `find_groups` returns them.

    Attributes:
        unequal: output -> the number of batches whose shapes differ; they are left out.
    """

    def __init__(self, groups: Sequence[ColumnGroup]) -> None:
        self.groups = tuple(groups)
        self.unequal: dict[int, int] = {}
        self._sums = [_GroupSums() for _ in self.groups]

    def add(self, reference: Sequence[np.ndarray], test: Sequence[np.ndarray]) -> None:
        """Adds one batch.

        Args:
            reference: the true values of every output; those that are not floats are left out.
            test: the values in their place.
        """
        for index, (exact, rounded) in enumerate(zip(reference, test, strict=True)):
            if exact.dtype.kind == "f" and exact.shape != rounded.shape:
                self.unequal[index] = self.unequal.get(index, 0) + 1
        for group, sums in zip(self.groups, self._sums, strict=True):
            exact, rounded = reference[group.output], test[group.output]
            if comparable(exact, rounded) and exact.size:
                sums.add(group.select(exact), group.select(rounded), group.axis)

    def errors(self) -> tuple[GroupFigures, ...]:
        """Returns the error of each group, in the order of the groups; without groups of signal 0."""
        pairs = zip(self.groups, self._sums, strict=True)
        return tuple(sums.error(group) for group, sums in pairs if sums.total.signal > 0)

    def worst(self) -> GroupFigures | None:
        """Returns the group with the lowest SQNR; None if no values were compared."""
        errors = self.errors()
        return min(errors, key=lambda e: (e.informative, e.sqnr_db)) if errors else None

    def sqnr_db(self) -> float:
        """Returns the SQNR of the worst group in dB; infinity if no values were compared."""
        worst = self.worst()
        return math.inf if worst is None else worst.sqnr_db


def column_errors(
    reference: Outputs, test: Outputs, groups: Sequence[ColumnGroup] | None = None
) -> GroupedErrors:
    """Returns the errors of all column groups.

    Args:
        reference: for each batch the float outputs.
        test: for each batch the outputs in their place.
        groups: the column groups of the outputs; None for those that the values show.
    """
    errors = GroupedErrors(find_groups(None, reference) if groups is None else groups)
    for exact, rounded in zip(reference, test, strict=True):
        errors.add(exact, rounded)
    return errors


@dataclass(frozen=True)
class IntegerErrors:
    """How close an output of integers, such as indices, is to the float graph's.

    Attributes:
        output: the place of the output among the graph's outputs.
        equal: the share of equal values.
        sqnr_db: their SQNR in dB; numbers may be close without being equal, indices are not.
    """

    output: int
    equal: float
    sqnr_db: float


def integer_errors(reference: Outputs, test: Outputs) -> tuple[IntegerErrors, ...]:
    """Returns the errors of each output of integers; batches in which its shapes differ are left out."""
    errors = []
    for index, value in enumerate(reference[0]):
        if value.dtype.kind not in "iub":
            continue
        equal, count, sums = 0, 0, ErrorSums()
        for exact, rounded in zip(reference, test, strict=True):
            if exact[index].shape == rounded[index].shape:
                equal += int(np.sum(exact[index] == rounded[index]))
                count += exact[index].size
                sums.add(exact[index], rounded[index])
        if count:
            errors.append(IntegerErrors(index, equal / count, sums.sqnr_db))
    return tuple(errors)


@dataclass
class _GroupSums:
    """The sums of one group.

    Attributes:
        total: the sums over all values.
        moments: values, sum of f, of f**2, of q, of q**2, of q - f and of (q - f)**2 of each column. None
            before the first batch; empty if batches have unequal numbers of columns.
    """

    total: ErrorSums = field(default_factory=ErrorSums)
    moments: np.ndarray | None = None

    def add(self, reference: np.ndarray, test: np.ndarray, axis: int | None) -> None:
        self.total.add(reference, test)
        moments = _moments(reference, test, axis)
        if self.moments is None:
            self.moments = moments
        elif self.moments.shape == moments.shape:
            self.moments = self.moments + moments
        else:
            self.moments = np.zeros((7, 0))

    def error(self, group: ColumnGroup) -> GroupFigures:
        moments = np.zeros((7, 0)) if self.moments is None else self.moments
        count = np.maximum(moments[0], 1)
        f, q, e = (float(np.maximum(moments[i + 1] - moments[i] ** 2 / count, 0.0).sum()) for i in (1, 3, 5))
        return GroupFigures(group, self.total, f, q, e)


def _moments(reference: np.ndarray, test: np.ndarray, axis: int | None) -> np.ndarray:
    """Returns the moments of each column; of the channels, or else the last axis, of a whole output."""
    if axis is None:
        axis = 1 if reference.ndim >= 4 else max(reference.ndim - 1, 0)
    if reference.ndim < 2:
        f, q = reference.reshape(-1, 1), test.reshape(-1, 1)
    else:
        f, q = (np.moveaxis(v, axis, -1).reshape(-1, v.shape[axis]) for v in (reference, test))
    f, q = f.astype(np.float64), q.astype(np.float64)
    finite = np.isfinite(f) & np.isfinite(q)
    if not finite.all():
        f, q = np.where(finite, f, 0.0), np.where(finite, q, 0.0)
    e = q - f
    parts = (v for u in (f, q, e) for v in (u.sum(axis=0), np.einsum("ij,ij->j", u, u)))
    return np.stack([finite.sum(axis=0).astype(np.float64), *parts])


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
