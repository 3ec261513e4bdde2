"""A range of the samples of a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from qtrace.data.base import Batch, SizedSource, batch_length

__all__ = ["SampleRange"]


class SampleRange(SizedSource):
    """Samples ``start`` to ``stop`` of a source, in its batches; those at both ends are cut.

    Args:
        source: batches whose arrays have the samples on their first axis.
        start, stop: the numbers of the first sample and of the one behind the last.
    """

    def __init__(self, source: SizedSource, start: int, stop: int) -> None:
        super().__init__(source.source, None)
        self._whole, self._start, self._stop = source, start, stop
        self.pixels, self.cut, self.skipped = source.pixels, source.cut, source.skipped

    def identity(self) -> str:
        """Returns the identity of the whole data, and the range."""
        return f"{self._whole.identity()} {self._start} {self._stop}"

    def _count(self) -> int:
        return sum(1 for _ in self._batches(lambda number: True))

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        number = first = 0
        for batch in self._whole:
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
