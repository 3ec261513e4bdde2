"""Batches of one number of samples, whatever batches data come in."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from qtrace.data.base import Batch, DataSource, DerivedSource, SizedSource, batch_length, length_of_last
from qtrace.errors import DataError

__all__ = ["Recut", "SampleRange", "cut_batch", "filled_batches", "recut", "shares_samples"]


def shares_samples(batch: Batch) -> bool:
    """Returns whether all arrays of a batch have one first axis, which counts the samples."""
    lengths = {len(value) for value in _values(batch) if value.ndim}
    return len(lengths) == 1


def filled_batches(batch: Batch, size: int) -> list[Batch]:
    """Cuts a batch into batches of ``size`` samples; the last one is filled up with samples from the start.

    A batch whose arrays have other first axes than one of samples stays as it is.
    """
    count = batch_length(batch)
    if count in (0, size) or not shares_samples(batch):
        return [batch]
    rows = (np.arange(start, start + size) % count for start in range(0, count, size))
    return [_map(batch, operator.itemgetter(chosen)) for chosen in rows]


def recut(source: DataSource, size: int | None, whole: bool = False) -> Recut:
    """Returns the samples of a source in batches of ``size``, of which it knows the number if it is known.

    Args:
        source: batches of any number of samples; of a source that is ``cut``, of ``size`` ones.
        size: the number of samples of a batch; None for the batches as they are.
        whole: whether the network takes no batch with fewer samples; they are left out.

    Raises:
        DataError: when no whole batch can be made.
    """
    batches = (_SizedRecut if isinstance(source, SizedSource) else Recut)(source, size, whole)
    if whole and not any(True for _ in batches.numbered()):
        most = max(map(batch_length, source))
        raise DataError(
            f"{source.source} has batches of {most} samples at most, and the network takes {size} at "
            "once: give larger batches."
        )
    return batches


class Recut(DerivedSource):
    """The samples of a source in other batches; see `recut`.

    Batches are joined if their arrays have samples of one shape, and settings of one value.

    Attributes:
        size: the number of samples of a batch; None for the batches as they are.
        whole: whether batches with fewer samples are left out.
    """

    def __init__(self, source: DataSource, size: int | None, whole: bool) -> None:
        super().__init__(source)
        self.size, self.whole = size, whole
        self.max_batches = source.max_batches if size is None else None  # which the source keeps

    def identity(self) -> str:
        """Returns the identity of the whole data, and the size."""
        return f"{self.inner.identity()} {self.size} {self.whole}"

    @cached_property
    def lengths(self) -> Sequence[int]:
        """The number of samples of each batch; the data are read for it unless they are cut from arrays."""
        if not self.cut or self.size is None or not isinstance(self.inner, SizedSource):
            return [batch_length(batch) for _, batch in self._batches(lambda number: True)]
        first, last = [self.size] * (len(self.inner) - 1), length_of_last(self.inner)
        return first if self.whole and last != self.size else [*first, last]

    @property
    def left_out(self) -> int:
        """The number of samples at the end of arrays that are in no whole batch."""
        arrays = self.whole and self.cut and isinstance(self.inner, SizedSource)
        return length_of_last(self.inner) % self.size if arrays and self.size else 0  # type: ignore[arg-type]

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        if self.cut or self.size is None:  # numbers stay: only the last one has fewer samples
            numbered = self.inner.numbered(selects)
        else:
            numbered = enumerate(self._joined(self.size))
        first = 0
        for number, batch in numbered:
            count = batch_length(batch)
            first = number * self.size if self.cut and self.size else first
            if not self.whole or count == self.size:
                yield number if self.size is None else _Number(number, first, first + count - 1), batch
            first += count

    def _joined(self, size: int) -> Iterator[Batch]:
        """Yields all batches of ``size`` samples, and what is left before samples of another shape."""
        parts: list[Batch] = []
        last: Any = None
        for batch in self.inner:
            form = _form(batch) if shares_samples(batch) else None
            if form != last:
                yield from () if self.whole else parts
                parts, last = [], form
            joined = _join([*parts, batch])
            count = batch_length(joined)
            step = count if form is None else size
            cuts = [cut_batch(joined, low, min(low + step, count)) for low in range(0, count, step)]
            parts = [] if batch_length(cuts[-1]) >= step else [cuts.pop()]
            yield from cuts
        yield from () if self.whole else parts


class _Number(int):
    """The number of a batch of samples that came in other batches; its text names these samples, too.

    Attributes:
        first, last: the numbers of its first and last sample in the data.
    """

    def __new__(cls, number: int, first: int = 0, last: int = 0) -> _Number:
        """Returns the number with the place of its samples."""
        self = super().__new__(cls, number)
        self.first, self.last = first, last
        return self

    def __str__(self) -> str:
        return f"{int(self)} (samples {self.first} to {self.last} of the data)"


class _SizedRecut(Recut, SizedSource):
    """The same of a source that knows its length."""

    def _count(self) -> int:
        return len(self.lengths)


def _values(batch: Batch) -> list[np.ndarray]:
    return list(batch.values() if isinstance(batch, dict) else batch)


def _map(batch: Batch, change: Callable[[np.ndarray], np.ndarray]) -> Batch:
    """Changes the arrays of a batch; a single number, which is a setting, stays as it is."""
    if isinstance(batch, dict):
        return {key: change(value) if value.ndim else value for key, value in batch.items()}
    return tuple(change(value) if value.ndim else value for value in batch)


def cut_batch(batch: Batch, low: int, high: int) -> Batch:
    """Returns the samples ``low`` to ``high`` of a batch."""
    return batch if (low, high) == (0, batch_length(batch)) else _map(batch, lambda value: value[low:high])


def _join(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    first, columns = batches[0], zip(*map(_values, batches), strict=True)
    values = [np.concatenate(column) if column[0].ndim else column[0] for column in columns]
    return dict(zip(first, values, strict=True)) if isinstance(first, dict) else tuple(values)


def _form(batch: Batch) -> list[Any]:
    """Returns what batches have in common whose samples fit: names, types, shapes, and values of settings."""
    named = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return [(key, value.dtype, value.shape[1:] if value.ndim else value.item()) for key, value in named]


class SampleRange(DerivedSource, SizedSource):
    """Samples ``start`` to ``stop`` of a source, in its batches, which keep their numbers.

    Args:
        source: the batches; those at both ends are cut, unless batches are as they were given.
        start, stop: the numbers of the first sample and of the one after the last; None for all.
    """

    def __init__(self, source: Recut, start: int, stop: int | None) -> None:
        super().__init__(source)
        self.recut, self.start, self.stop = source, start, stop

    def identity(self) -> str:
        """Returns the identity of the whole data, and the range."""
        return f"{self.inner.identity()} {self.start} {self.stop}"

    def _count(self) -> int:
        return self._number

    @cached_property
    def _number(self) -> int:
        if not isinstance(self.inner, SizedSource):
            return sum(1 for _ in self._batches(lambda number: True))
        lengths, stop = self.recut.lengths, math.inf if self.stop is None else self.stop
        ends = zip(itertools.accumulate(lengths), lengths, strict=True)
        if self.recut.size is None:
            return sum(self.start < end <= stop for end, _ in ends)
        return sum(self.start < end and end - count < stop for end, count in ends)

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        size, stop, first = self.recut.size, math.inf if self.stop is None else self.stop, 0

        def reaches(number: int) -> bool:
            inside = size is None or self.start < (number + 1) * size <= stop + size - 1
            return not self.cut or (inside and selects(number))

        for number, batch in self.inner.numbered(reaches):
            count = batch_length(batch)
            first = number * size if self.cut and size else first
            low, high = max(self.start - first, 0), int(min(stop - first, count))
            if size is None:  # a batch with samples beyond an end belongs to what comes after
                low, high = (0, count) if self.start < first + count <= stop else (0, 0)
            first += count
            if low < high:
                yield number, cut_batch(batch, low, high)
            if first >= stop:
                return
