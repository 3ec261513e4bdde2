"""What every data source is, and which arrays a model can be fed."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import DataError

__all__ = ["Batch", "DataSource", "SizedSource", "check_rank", "file_identity", "to_input"]

Batch = tuple[np.ndarray, ...] | dict[str, np.ndarray]
"""The inputs of one call of the model: by position, or by name."""

_INT32 = np.iinfo(np.int32)
_MAX_RANK = 7  # of MegEngine's tensors


class DataSource(abc.ABC):
    """Batches of model inputs, from the start again at each iteration.

    Attributes:
        source: what ``open_data`` was given.
        max_batches: how many batches an iteration gives at most, or None.
        given: how many batches the present or last iteration gave.
        skipped: what was left out so far: unreadable images under ``skip_bad``, label arrays of an ``.npz``.
    """

    def __init__(self, source: str, max_batches: int | None) -> None:
        self.source = source
        self.max_batches = max_batches
        self.given = 0
        self.skipped: list[str] = []

    def __iter__(self) -> Iterator[Batch]:
        for _, batch in self.numbered():
            yield batch
        if not self.given:
            raise DataError(f"{self.source} gives no batch; calibration and checks need at least one.")

    def numbered(
        self,
        wanted: Callable[[int], bool] = lambda number: True,
        passed: Callable[[int, Batch], None] = lambda number, batch: None,
    ) -> Iterator[tuple[int, Batch]]:
        """Some of the batches, with their numbers, which are the same at every iteration.

        Args:
            wanted: whether to give the batch of a number; others are not read where that can be avoided.
            passed: called with each batch that was read although it is not wanted.
        """
        self.given = 0
        for number, batch in self._batches(wanted):
            if self.max_batches is not None and number >= self.max_batches:
                return
            if wanted(number):
                self.given += 1
                yield number, batch
            else:
                passed(number, batch)
            if number + 1 == self.max_batches:  # not one batch more is read
                return

    def identity(self) -> str:
        """What tells this data from other data of the same name, without reading it."""
        return self.source

    @abc.abstractmethod
    def _batches(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        """Number and batch of all batches that are wanted, and of those that had to be read besides."""


class SizedSource(DataSource):
    """A source that knows its number of batches before it is read."""

    def __len__(self) -> int:
        count = self._count()
        return count if self.max_batches is None else min(count, self.max_batches)

    @abc.abstractmethod
    def _count(self) -> int:
        """The number of all batches, however many were asked for."""


def file_identity(path: Path) -> str:
    """Size and time of change of a file."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    return f"{status.st_size} {status.st_mtime_ns}"


def check_dtype(dtype: np.dtype[Any], where: str) -> None:
    """Raises DataError unless values of ``dtype`` can be an input."""
    if dtype.kind not in "fiub":
        raise DataError(
            f"{where} has dtype {dtype}, which is no model input; store floats, integers, booleans or uint8."
        )


def check_rank(rank: int, where: str) -> None:
    """Raises DataError unless MegEngine has tensors of ``rank`` axes."""
    if rank > _MAX_RANK:
        raise DataError(
            f"{where} has {rank} axes, and MegEngine's tensors have at most {_MAX_RANK}: reshape the array."
        )


def to_input(array: np.ndarray, where: str) -> np.ndarray:
    """The array as MegEngine takes it, in memory of its own.

    Floats and uint8 become float32. Booleans and integers stay what they are, except that 64-bit integers and
    uint32 become int32: MegEngine has none, and would wrap large values around without a word.

    Args:
        array: any array.
        where: what to call it in an error.
    """
    dtype = array.dtype
    check_dtype(dtype, where)
    check_rank(array.ndim, where)
    if dtype.kind == "f" or dtype == np.uint8:
        with np.errstate(over="ignore"):  # an overflow becomes Inf, which the observers report
            return np.array(array, dtype=np.float32, order="C")
    if dtype.kind == "b" or dtype.itemsize < 4 or dtype == np.int32:
        return np.array(array, dtype=dtype.newbyteorder("="), order="C")
    if array.size and (array.max() > _INT32.max or array.min() < _INT32.min):
        raise DataError(f"{where} has {dtype} values beyond 32 bits, which MegEngine cannot hold.")
    return np.array(array, dtype=np.int32, order="C")
