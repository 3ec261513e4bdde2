"""Batches of one size, for a network that takes no others, and ranges of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from qtrace.data.base import Batch, DataSource, DerivedSource, SizedSource, batch_length, length_of_last
from qtrace.errors import DataError

__all__ = ["SampleRange", "describe_left_out", "filled_batches", "whole_batches"]


def whole_batches(source: DataSource, size: int | None) -> DataSource:
    """Returns the batches of ``source`` that have ``size`` samples; all of them if ``size`` is None.

    Raises:
        DataError: when no batch of a source that knows its length has as many samples.
    """
    if size is None:
        return source
    if not isinstance(source, SizedSource):
        return _Whole(source, size)
    whole = _SizedWhole(source, size)
    if not len(whole) and len(source):
        most = max(map(batch_length, source))
        raise DataError(
            f"{source.source} has no batch of {size} samples, but of {most}, and the network takes {size} at "
            "once: give as many."
        )
    return whole


def describe_left_out(source: DataSource, size: int | None) -> str:
    """Returns what `whole_batches` leaves out, as a clause; "" if all of it has one size."""
    if size is None:
        return ""
    if not source.cut or not isinstance(source, SizedSource):
        return f"batches of other than {size} samples are left out"
    left = length_of_last(source) % size
    several = "samples are" if left > 1 else "sample is"
    return f"the last {f'{left} ' if left > 1 else ''}{several} left out" if left else ""


def filled_batches(batch: Batch, size: int) -> list[Batch]:
    """Cuts a batch into batches of ``size`` samples; the last one is filled up with samples from the start.

    A batch whose arrays have other first axes than one of samples stays as it is.
    """
    values = batch.values() if isinstance(batch, dict) else batch
    count = batch_length(batch)
    if count in (0, size) or any(value.ndim and len(value) != count for value in values):
        return [batch]
    batches: list[Batch] = []
    for start in range(0, count, size):
        rows = np.arange(start, start + size) % count
        if isinstance(batch, dict):
            batches.append({key: value[rows] if value.ndim else value for key, value in batch.items()})
        else:
            batches.append(tuple(value[rows] if value.ndim else value for value in batch))
    return batches


class _Whole(DerivedSource):
    """The batches of a source that have a number of samples, numbered anew."""

    def __init__(self, source: DataSource, size: int) -> None:
        super().__init__(source)
        self._size = size

    def identity(self) -> str:
        """Returns the identity of the whole data, and the size."""
        return f"{self.inner.identity()} {self._size}"

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        if self.cut:  # all but the last one have one size, so that their numbers stay
            numbered = self.inner.numbered(selects)
            yield from ((number, batch) for number, batch in numbered if self._is_whole(batch))
            return
        whole = (batch for _, batch in self.inner.numbered() if self._is_whole(batch))
        yield from enumerate(whole)

    def _is_whole(self, batch: Batch) -> bool:
        return batch_length(batch) == self._size


class _SizedWhole(_Whole, SizedSource):
    """The same of a source that knows its length, read once for it unless it is cut from arrays."""

    def __init__(self, source: SizedSource, size: int) -> None:
        super().__init__(source, size)
        self._sized = source
        self._known: int | None = None

    def _count(self) -> int:
        if self._known is None:
            if self.cut:
                self._known = len(self._sized) - 1 + (length_of_last(self._sized) == self._size)
            else:
                self._known = sum(1 for _ in self._batches(lambda number: True))
        return self._known


class SampleRange(DerivedSource, SizedSource):
    """Samples ``start`` to ``stop`` of a source, in its batches; those at both ends are cut.

    Args:
        source: batches whose arrays have the samples on their first axis.
        start, stop: the numbers of the first sample and of the one after the last.
    """

    def __init__(self, source: SizedSource, start: int, stop: int) -> None:
        super().__init__(source)
        self.max_batches, self._start, self._stop = None, start, stop

    def identity(self) -> str:
        """Returns the identity of the whole data, and the range."""
        return f"{self.inner.identity()} {self._start} {self._stop}"

    def _count(self) -> int:
        return sum(1 for _ in self._batches(lambda number: True))

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        number = first = 0
        for batch in self.inner:
            count = batch_length(batch)
            low, high = max(self._start - first, 0), min(self._stop - first, count)
            first += count
            if low < high:
                yield number, _cut(batch, low, high)
                number += 1


def _cut(batch: Batch, low: int, high: int) -> Batch:
    """Cuts the arrays of a batch; a single number stays whole."""
    if isinstance(batch, dict):
        return {key: value[low:high] if value.ndim else value for key, value in batch.items()}
    return tuple(value[low:high] if value.ndim else value for value in batch)
