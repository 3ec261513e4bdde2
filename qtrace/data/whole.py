"""Batches of one number of samples, whatever batches data come in, and ranges of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from qtrace.data.base import Batch, DataSource, DerivedSource, SizedSource, batch_length, length_of_last
from qtrace.errors import DataError

__all__ = ["Recut", "SampleRange", "filled_batches", "recut", "shares_samples"]


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
    return [_map(batch, lambda value, chosen=chosen: value[chosen]) for chosen in rows]


def recut(source: DataSource, size: int | None, whole: bool = False) -> Recut:
    """Returns the samples of a source in batches of ``size``, of which it knows the number if it is known.

    Args:
        source: batches of any number of samples; of a source that is ``cut``, of ``size`` ones.
        size: the number of samples of a batch; None for the batches as they are.
        whole: whether the network takes no batch with fewer samples; they are left out.

    Raises:
        DataError: when no whole batch can be made of a source that knows its length.
    """
    if not isinstance(source, SizedSource):
        return Recut(source, size, whole)
    batches = _SizedRecut(source, size, whole)
    if whole and len(source) and not len(batches):
        most = max(map(batch_length, source))
        raise DataError(
            f"{source.source} has no batch of {size} samples, but of {most}, and the network takes {size} at "
            "once: give as many."
        )
    return batches


class Recut(DerivedSource):
    """The samples of a source in other batches; see `recut`.

    Batches are joined where their arrays have samples of one shape, and settings of one value.

    Attributes:
        size: the number of samples of a batch; None for the batches as they are.
        whole: whether batches with fewer samples are left out.
    """

    def __init__(self, source: DataSource, size: int | None, whole: bool) -> None:
        super().__init__(source)
        self.size, self.whole = size, whole

    def identity(self) -> str:
        """Returns the identity of the whole data, and the size."""
        return f"{self.inner.identity()} {self.size} {self.whole}"

    @cached_property
    def lengths(self) -> Sequence[int]:
        """The number of samples of each batch; the data are read for it unless they are cut from arrays."""
        if self.cut and isinstance(self.inner, SizedSource) and len(self.inner):
            last = length_of_last(self.inner)
            rest = [] if self.whole and last != self.size else [last]
            first = [batch_length(next(iter(self.inner)))] * (len(self.inner) - 1)
            return [*first, *rest]
        return [batch_length(batch) for _, batch in self._batches(lambda number: True)]

    @property
    def left_out(self) -> int:
        """The number of samples at the end that are in no whole batch; 0 if that takes long to know."""
        if not self.whole or not self.cut or not isinstance(self.inner, SizedSource) or self.size is None:
            return 0
        return length_of_last(self.inner) % self.size

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        if self.cut or self.size is None:  # numbers stay: only the last one has fewer samples
            numbered = self.inner.numbered(selects)
        else:
            numbered = enumerate(self._joined(self.size))
        yield from (pair for pair in numbered if not self.whole or batch_length(pair[1]) == self.size)

    def _joined(self, size: int) -> Iterator[Batch]:
        """Yields all batches of ``size`` samples, and what is left before samples of another shape."""
        parts: list[Batch] = []
        for batch in self.inner:
            if parts and not _fit(parts[0], batch):
                yield from parts
                parts = []
            joined = _join([*parts, batch])
            count = batch_length(joined)
            cuts = [_cut(joined, start, min(start + size, count)) for start in range(0, count, size)]
            parts = [] if batch_length(cuts[-1]) == size else [cuts.pop()]
            yield from cuts
        if not self.whole:
            yield from parts


class _SizedRecut(Recut, SizedSource):
    """The same of a source that knows its length."""

    def _count(self) -> int:
        return len(self.lengths)


class SampleRange(DerivedSource, SizedSource):
    """Samples ``start`` to ``stop`` of a source, in its batches, which keep their numbers.

    Args:
        source: the batches. Where these are as they were given, one with samples beyond ``start`` or ``stop``
            belongs to what comes after; else those at both ends are cut.
        start, stop: the numbers of the first sample and of the one after the last; None for all.
    """

    def __init__(self, source: Recut, start: int, stop: int | None) -> None:
        super().__init__(source)
        self._recut, self.start, self.stop = source, start, stop

    def identity(self) -> str:
        """Returns the identity of the whole data, and the range."""
        return f"{self.inner.identity()} {self.start} {self.stop}"

    def _count(self) -> int:
        return sum(1 for _ in self._parts(lambda number: True))

    def _parts(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, int, int]]:
        """Yields number, first and last sample in the batch, of each batch that has samples of the range."""
        first = 0
        for number, count in enumerate(self._recut.lengths):
            low, high = self._within(first, count)
            first += count
            if low < high and selects(number):
                yield number, low, high

    def _within(self, first: int, count: int) -> tuple[int, int]:
        """Returns which samples of a batch are in the range."""
        stop = first + count if self.stop is None else self.stop
        if self._recut.size is None:
            inside = self.start < first + count <= stop
            return (0, count) if inside else (0, 0)
        return max(self.start - first, 0), min(stop - first, count)

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        first = 0
        if self.cut:
            parts = {number: (low, high) for number, low, high in self._parts(selects)}
            for number, batch in self.inner.numbered(parts.__contains__):
                yield number, _cut(batch, *parts[number])
            return
        for number, batch in self.inner.numbered():
            low, high = self._within(first, batch_length(batch))
            first += batch_length(batch)
            if low < high:
                yield number, _cut(batch, low, high)
            elif self.stop is not None and first >= self.stop:
                return


def _values(batch: Batch) -> list[np.ndarray]:
    return list(batch.values() if isinstance(batch, dict) else batch)


def _map(batch: Batch, change: Callable[[np.ndarray], np.ndarray]) -> Batch:
    """Changes the arrays of a batch; a single number, which is a setting, stays as it is."""
    if isinstance(batch, dict):
        return {key: change(value) if value.ndim else value for key, value in batch.items()}
    return tuple(change(value) if value.ndim else value for value in batch)


def _cut(batch: Batch, low: int, high: int) -> Batch:
    return batch if (low, high) == (0, batch_length(batch)) else _map(batch, lambda value: value[low:high])


def _join(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    first, columns = batches[0], zip(*map(_values, batches), strict=True)
    values = [np.concatenate(column) if column[0].ndim else column[0] for column in columns]
    return dict(zip(first, values, strict=True)) if isinstance(first, dict) else tuple(values)


def _fit(first: Batch, second: Batch) -> bool:
    """Whether two batches have samples of one shape, and settings of one value."""
    if not (shares_samples(first) and shares_samples(second)) or _keys(first) != _keys(second):
        return False
    pairs = zip(_values(first), _values(second), strict=True)
    return all(
        a.dtype == b.dtype and a.shape[1:] == b.shape[1:] and a.ndim == b.ndim and (a.ndim > 0 or a == b)
        for a, b in pairs
    )


def _keys(batch: Batch) -> list[str] | int:
    return list(batch) if isinstance(batch, dict) else len(batch)
