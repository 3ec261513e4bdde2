"""Statistics of quantized layers, which make the error of any weight and bias algebra: no layer runs again.

``x~`` is what a quantized layer reads, ``r = y - W x~`` what its float weight W misses of the float output
y, and ``E`` a change of the weight. The error of the output is ``r - E x~``, and its square over all
positions ``sum r**2 - 2 tr(E C) + tr(E H E^T)`` with ``C = sum x~ r^T`` and ``H = sum x~ x~^T``. A bias adds
terms of the sums of r and x~. These sums are collected once for a layer: apart for each half of the samples,
which cross-validate, and for those that are held back. Of the latter, and of layers with more inputs than
are rounded jointly, the rows themselves are kept.

Products are summed in float32 over at most 1024 rows, and in float64 from there on. One layer is in memory
at a time: for D inputs and O outputs four times ``8 D (min(D, 1152) + O)`` bytes, and ``4 D`` for each kept
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from qtrace.errors import CalibrationError
from qtrace.process.together import Together
from qtrace.ptq.layers.held_back import OutputErrors
from qtrace.ptq.layers.positions import products
from qtrace.ptq.layers.quantized import QuantizedLayer
from qtrace.ptq.layers.second_order import SecondMoments, added, parts

__all__ = ["HELD", "LayerStatistics", "RowSums", "WeightErrors", "fold_of"]

HELD = 2
"""The fold of the samples that are held back; 0 and 1 are the halves of all others."""

_FOLDS = (0, 1, HELD)

# Rows that are multiplied at once: sums in float32 stay exact enough, and more rows take no less time.
_PRODUCT_ROWS = 1024


def fold_of(number: int, count: int, held: Sequence[int]) -> int:
    """Returns the fold of a batch of ``count``."""
    return HELD if number in held else 2 * number // count


@dataclass(frozen=True)
class _Rows:
    """What a layer reads, misses and should give in one batch: (G, P, D), (G, P, O); and their weight."""

    read: np.ndarray
    missed: np.ndarray
    weight: float


@dataclass
class RowSums:
    """Sums over the rows of one fold.

    Attributes:
        inputs: number of inputs D of a group.
        moments: the moments of each of the `parts` of the inputs.
        square: the sum of the squares of what is missed.
        signal: the sum of the squared references.
        batches: the rows of each batch, where they are kept.
        keep: whether they are kept.
    """

    inputs: int
    keep: bool
    moments: list[SecondMoments] = field(default_factory=list)
    square: float = 0.0
    signal: float = 0.0
    batches: dict[int, list[_Rows]] = field(default_factory=dict)
    _waiting: list[_Rows] = field(default_factory=list)
    _size: int = 0

    def add(
        self, batch: int, read: np.ndarray, missed: np.ndarray, reference: np.ndarray, weight: float
    ) -> None:
        """Adds the rows of a batch: inputs (G, P, D), what is missed and the reference, both (G, P, O)."""
        rows = _Rows(read, missed, weight)
        self.square += weight * _squared(missed)
        self.signal += weight * _squared(reference)
        if self.keep:
            self.batches.setdefault(batch, []).append(rows)
        if self._waiting and (
            weight != self._waiting[0].weight or self._size + read.shape[1] > _PRODUCT_ROWS
        ):
            self.flush()
        self._waiting.append(rows)
        self._size += read.shape[1]

    def flush(self) -> None:
        """Adds up the rows that wait to be multiplied together."""
        if not self._waiting:
            return
        weight = self._waiting[0].weight
        read, missed = (
            part[0] if len(part) == 1 else np.concatenate(part, axis=1)
            for part in ([rows.read for rows in self._waiting], [rows.missed for rows in self._waiting])
        )
        split = parts(self.inputs)
        whole = len(split) == 1
        for start in range(0, read.shape[1], _PRODUCT_ROWS):
            piece = slice(start, start + _PRODUCT_ROWS)
            crossed = missed[:, piece] if whole else missed[:, piece, :0]
            rows = [read[:, piece, p] for p in split]
            if self.moments:
                pairs = zip(self.moments, rows, strict=True)
                self.moments = [moments.with_rows(row, crossed, weight) for moments, row in pairs]
            else:
                sums = [SecondMoments.of(row, crossed) for row in rows]
                self.moments = sums if weight == 1 else [weight * m for m in sums]
        self._waiting, self._size = [], 0


@dataclass
class LayerStatistics:
    """The sums of one layer in each fold.

    Attributes:
        layer: the layer.
        folds: fold -> its sums, for those that have samples.
        wide: whether the inputs are more than are rounded jointly; rows then take the place of moments.
    """

    layer: QuantizedLayer
    inputs: int
    folds: dict[int, RowSums] = field(default_factory=dict)

    @property
    def wide(self) -> bool:
        return len(parts(self.inputs)) > 1

    @property
    def held(self) -> bool:
        """Whether samples are held back."""
        return HELD in self.folds

    def add(
        self,
        fold: int,
        batch: int,
        read: np.ndarray,
        missed: np.ndarray,
        reference: np.ndarray,
        weight: float,
    ) -> None:
        """Adds the rows of a batch to a fold; see `RowSums.add`."""
        self.open(fold).add(batch, read, missed, reference, weight)

    def open(self, fold: int) -> RowSums:
        """Returns the sums of a fold, which has samples."""
        if fold not in self.folds:
            self.folds[fold] = RowSums(self.inputs, self.wide or fold == HELD)
        return self.folds[fold]

    def finish(self, together: Together) -> None:
        """Adds up what waits.

        Args:
            together: the threads that compute.

        Raises:
            CalibrationError: when a value is not finite.
        """
        together.map(RowSums.flush, self.folds.values())
        for sums in self.folds.values():
            if not np.isfinite(sums.square + sums.signal):
                raise CalibrationError(
                    f"{self.layer.name} has values that are NaN or infinite: the model is left as it was; "
                    "look at the calibration data and at the layers before this one."
                )

    def moments(self, folds: Sequence[int]) -> list[SecondMoments]:
        """Returns the moments of some folds, which are not to be changed; [] without samples."""
        return self._whole if tuple(folds) == _FOLDS else self._moments(folds)

    @cached_property
    def _whole(self) -> list[SecondMoments]:
        return self._moments(_FOLDS)

    def _moments(self, folds: Sequence[int]) -> list[SecondMoments]:
        total: list[SecondMoments] = []
        for fold in folds:
            if fold in self.folds:
                total = added(total, self.folds[fold].moments)
        return total


class WeightErrors:
    """The errors of a layer's output with its weight changed, each of which is computed once.

    Attributes:
        change: as the argument.

    Args:
        statistics: the sums of the layer.
        change: the change of the weight, (G, O, D), which stays as it is meanwhile; None for none.
    """

    def __init__(self, statistics: LayerStatistics, change: np.ndarray | None) -> None:
        self._statistics, self.change = statistics, change
        self._rows: dict[int, dict[int, OutputErrors]] = {}
        self._total: OutputErrors | None = None

    @property
    def total(self) -> OutputErrors:
        """The errors in all samples."""
        if self._total is None:  # no cached_property, whose lock all objects share
            self._total = self._sum()
        return self._total

    def compute(self, whole: bool = True) -> WeightErrors:
        """Computes the errors before they are asked for; returns this object.

        Args:
            whole: whether to compute ``total``, too, next to ``held``.
        """
        if whole:
            self._total = self._sum()
        if self._statistics.held:
            self._in_batches(HELD)
        return self

    def _sum(self) -> OutputErrors:
        folds = [fold for fold in _FOLDS if fold in self._statistics.folds]
        if self._by_rows:
            return _total([e for fold in folds for e in self._in_batches(fold).values()])
        sums = [self._statistics.folds[fold] for fold in folds]
        square, signal = (sum(getattr(s, name) for s in sums) for name in ("square", "signal"))
        missed, count = self._missed(_FOLDS)
        if self.change is not None:
            moments = self._statistics.moments(_FOLDS)[0]
            crossed = np.einsum("god,gdo->", self.change, moments.cross)
            bent = np.einsum("god,god->", self.change @ moments.square, self.change)
            square = float(square - 2 * crossed + bent)
        return OutputErrors(count, missed, square, signal)

    @property
    def fitted_mean(self) -> np.ndarray:
        """The mean error of each channel in the samples that are not held back, (C,)."""
        if self._by_rows:
            folds = [fold for fold in (0, 1) if fold in self._statistics.folds]
            return _total([e for fold in folds for e in self._in_batches(fold).values()]).mean
        missed, count = self._missed((0, 1))
        return missed / max(count, 1)

    @property
    def held(self) -> dict[int, OutputErrors]:
        """The errors in each batch that is held back."""
        return self._in_batches(HELD) if self._statistics.held else {}

    @property
    def _by_rows(self) -> bool:
        return self.change is not None and self._statistics.wide

    def _in_batches(self, fold: int) -> dict[int, OutputErrors]:
        if fold not in self._rows:
            self._rows[fold] = _errors_by_rows(self._statistics.folds[fold], self.change)
        return self._rows[fold]

    def _missed(self, folds: Sequence[int]) -> tuple[np.ndarray, float]:
        """Returns the sums of what each channel misses, (C,), and the number of positions."""
        moments = self._statistics.moments(folds)
        first, count = moments[0], moments[0].count
        if not first.missed.size:  # of a wide layer, or of one whose inputs do not count
            sums = [self._statistics.folds[fold] for fold in folds if fold in self._statistics.folds]
            rows = [r for s in sums for batch in s.batches.values() for r in batch]
            totals = [r.weight * r.missed.sum(axis=1, dtype=np.float64) for r in rows]
            return np.sum(totals, axis=0).reshape(-1), count
        total = sum((m.missed for m in moments[1:]), first.missed)
        if self.change is not None:
            total = total - np.einsum("god,gd->go", self.change, first.read)
        return total.reshape(-1), count


def _total(errors: Sequence[OutputErrors]) -> OutputErrors:
    first, *others = errors
    return sum(others, first)


def _errors_by_rows(sums: RowSums, change: np.ndarray | None) -> dict[int, OutputErrors]:
    weight = None if change is None else change.astype(np.float32)
    share = sums.signal / max(len(sums.batches), 1)
    result: dict[int, OutputErrors] = {}
    for batch, several in sums.batches.items():
        each = []
        for rows in several:
            error = rows.missed if weight is None else rows.missed - products(rows.read, weight)
            total = rows.weight * error.sum(axis=1, dtype=np.float64).reshape(-1)
            count = rows.weight * error.shape[1]
            each.append(OutputErrors(count, total, rows.weight * _squared(error), share / len(several)))
        result[batch] = _total(each)
    return result


def _squared(values: np.ndarray) -> float:
    """Sums the squares of float32 values: those side by side in memory in float32, their sums in float64."""
    rows = values.transpose(0, 2, 1) if values.strides[2] > values.strides[1] else values
    return float(np.einsum("gpo,gpo->gp", rows, rows).sum(dtype=np.float64))
