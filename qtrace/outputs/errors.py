"""The errors of each group of columns, in sums that merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qtrace.metrics import ErrorSums, comparable, decibels
from qtrace.outputs.groups import ColumnGroup

__all__ = ["NO_INFORMATION_DB", "GroupFigures", "GroupedErrors"]

NO_INFORMATION_DB = 3.0
"""Below this SQNR a group carries no information: half of the power is noise."""
_LEAST_VARIATION = 1e-8  # of the power, below which values are called constant
_CONSTANT = 1e-6  # of the float values' variation


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
        varies = self.variation > _LEAST_VARIATION * self.sums.signal
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
        groups: the groups, as `qtrace.outputs.find_groups` returns them.

    Attributes:
        unequal: output -> the number of batches whose shapes differ; they are left out.
    """

    def __init__(self, groups: Sequence[ColumnGroup]) -> None:
        self.groups = tuple(groups)
        self.unequal: dict[int, int] = {}
        self._sums = [_Sums() for _ in self.groups]

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

    def merge(self, other: GroupedErrors) -> None:
        """Adds the sums of other batches with the same groups."""
        for sums, others in zip(self._sums, other._sums, strict=True):
            sums.merge(others)
        for index, count in other.unequal.items():
            self.unequal[index] = self.unequal.get(index, 0) + count

    def errors(self) -> tuple[GroupFigures, ...]:
        """Returns the error of each group, in the order of the groups; without groups of signal 0."""
        pairs = zip(self.groups, self._sums, strict=True)
        return tuple(sums.error(group) for group, sums in pairs if sums.total.signal > 0)

    def worst(self) -> GroupFigures | None:
        """Returns the group with the lowest SQNR; None if no values were compared."""
        errors = self.errors()
        return min(errors, key=lambda e: (e.informative, e.sqnr_db)) if errors else None

    def shares(self) -> dict[ColumnGroup, float]:
        """Returns the noise of each group relative to its signal."""
        return {e.group: 10.0 ** (-e.sqnr_db / 10.0) for e in self.errors()}

    def sqnr_db(self) -> float:
        """Returns the SQNR of the worst group in dB; infinity if no values were compared."""
        worst = self.worst()
        return math.inf if worst is None else worst.sqnr_db


@dataclass
class _Sums:
    """The sums of one group.

    Attributes:
        total: the sums over all values.
        moments: values, sum of f, of f**2, of q, of q**2, of q - f and of (q - f)**2 of each column; None
            before the first batch, and empty if batches have unequal numbers of columns.
    """

    total: ErrorSums = field(default_factory=ErrorSums)
    moments: np.ndarray | None = None

    def add(self, reference: np.ndarray, test: np.ndarray, axis: int | None) -> None:
        self.total.add(reference, test)
        self._add_moments(_moments(reference, test, axis))

    def merge(self, other: _Sums) -> None:
        self.total += other.total
        if other.moments is not None:
            self._add_moments(other.moments)

    def _add_moments(self, moments: np.ndarray) -> None:
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
