"""What every data source is, and which arrays a model can be fed."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from qtrace.errors import DataError

__all__ = ["Batch", "DataSource", "SizedSource", "to_input"]

Batch = tuple[np.ndarray, ...] | dict[str, np.ndarray]
"""The inputs of one call of the model: by position, or by name."""

_INT32 = np.iinfo(np.int32)


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
        self.given = 0
        for batch in itertools.islice(self._batches(), self.max_batches):
            self.given += 1
            yield batch
        if not self.given:
            raise DataError(f"{self.source} gives no batch; calibration and checks need at least one.")

    @abc.abstractmethod
    def _batches(self) -> Iterator[Batch]:
        """All batches, however many were asked for."""


class SizedSource(DataSource):
    """A source that knows its number of batches before it is read."""

    def __len__(self) -> int:
        count = self._count()
        return count if self.max_batches is None else min(count, self.max_batches)

    @abc.abstractmethod
    def _count(self) -> int:
        """The number of all batches, however many were asked for."""


def check_dtype(dtype: np.dtype[Any], where: str) -> None:
    """Raises DataError unless values of ``dtype`` can be an input."""
    if dtype.kind not in "fiub":
        raise DataError(
            f"{where} has dtype {dtype}, which is no model input; store floats, integers, booleans or uint8."
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
    if dtype.kind == "f" or dtype == np.uint8:
        with np.errstate(over="ignore"):  # an overflow becomes Inf, which the observers report
            return np.array(array, dtype=np.float32, order="C")
    if dtype.kind == "b" or dtype.itemsize < 4 or dtype == np.int32:
        return np.array(array, dtype=dtype.newbyteorder("="), order="C")
    if array.size and (array.max() > _INT32.max or array.min() < _INT32.min):
        raise DataError(f"{where} has {dtype} values beyond 32 bits, which MegEngine cannot hold.")
    return np.array(array, dtype=np.int32, order="C")
