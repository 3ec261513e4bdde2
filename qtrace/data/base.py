"""The base of all data sources, and the arrays that a model takes.

Values that are no arrays: what other libraries hand out, and how to make an array of each.
"""

from __future__ import annotations

import abc
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import CalibrationError, DataError, refusing
from qtrace.graph.kernels import MAX_RANK

NO_EMPTY_AXES = (
    "give data in which each axis has a size of 1 or more, for the cache of a decoder those of a later step"
)
"""What to do about an array without a value, after a semicolon."""

GIVE_BATCHES = "give batches of several sizes as a list (pkg.mod:loader)"
"""What to do with arrays that are batches and not the inputs of one call, after "or"."""

Batch = tuple[np.ndarray, ...] | dict[str, np.ndarray]
"""The inputs of one call of the model: by position, or by name."""

_INT32 = np.iinfo(np.int32)


class DataSource(abc.ABC):
    """Batches of model inputs; each iteration begins with the first batch.

    Attributes:
        source: the argument of ``open_data``.
        max_batches: the largest number of batches of an iteration, or None.
        given: the number of batches of the current or last iteration so far.
        pixels: whether its values are pixels that ``preprocess`` converts.
        skipped: unreadable images that ``skip_bad`` left out so far, or label arrays of an ``.npz``.
        cut: whether its batches are cut from arrays whose first axis counts the samples.
        listeners: functions that are called with number and batch, for each batch that is given.
    """

    def __init__(self, source: str, max_batches: int | None) -> None:
        self.source = source
        self.max_batches = max_batches
        self.given = 0
        self.pixels = False
        self.cut = False
        self.skipped: list[str] = []
        self.listeners: list[Callable[[int, Batch], None]] = []

    def __iter__(self) -> Iterator[Batch]:
        for _, batch in self.numbered():
            yield batch
        if not self.given:
            raise DataError(f"{self.source} gives no batch; calibration and checks need at least one.")

    def numbered(
        self,
        selects: Callable[[int], bool] = lambda number: True,
        passed: Callable[[int, Batch], None] = lambda number, batch: None,
    ) -> Iterator[tuple[int, Batch]]:
        """Yields selected batches with their numbers, which are the same at every iteration.

        Args:
            selects: whether to yield the batch of a number; other batches are read only if necessary.
            passed: called with each batch that was read although it is not selected.
        """
        self.given = 0
        for number, batch in self._batches(selects):
            if self.max_batches is not None and number >= self.max_batches:
                return
            if selects(number):
                self.given += 1
                for listener in self.listeners:
                    listener(number, batch)
                yield number, batch
            else:
                passed(number, batch)
            if number + 1 == self.max_batches:  # reads no batch more
                return

    def identity(self) -> str:
        """Returns text that differs between versions of the data, without reading it."""
        return self.source

    @abc.abstractmethod
    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        """Yields number and batch of all selected batches, and of others that had to be read."""


class SizedSource(DataSource):
    """A source that knows its number of batches before it is read."""

    def __len__(self) -> int:
        count = self._count()
        return count if self.max_batches is None else min(count, self.max_batches)

    @abc.abstractmethod
    def _count(self) -> int:
        """Returns the number of all batches, regardless of ``max_batches``."""


class DerivedSource(DataSource):
    """Batches that are made of another source's batches.

    Args:
        inner: the other source.
    """

    def __init__(self, inner: DataSource) -> None:
        super().__init__(inner.source, inner.max_batches)
        self.inner = inner
        self.pixels, self.cut, self.skipped = inner.pixels, inner.cut, inner.skipped

    def identity(self) -> str:
        """Returns the identity of the other source."""
        return self.inner.identity()


def length_of_last(source: SizedSource) -> int:
    """Returns the number of samples in the last batch of a source; 0 if it is empty."""
    last = len(source) - 1
    return sum(batch_length(batch) for _, batch in source.numbered(lambda number: number == last))


def batch_length(batch: Batch) -> int:
    """Returns the number of samples of a batch: the length of its first array that is no single number."""
    values = batch.values() if isinstance(batch, dict) else batch
    return next((len(value) for value in values if value.ndim), 1)


def file_identity(path: Path) -> str:
    """Returns size and time of change of a file."""
    with refusing(DataError, path, "read"):
        status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def check_dtype(dtype: np.dtype[Any], label: str) -> None:
    """Raises DataError unless values of ``dtype`` can be an input."""
    if dtype.kind not in "fiub":
        raise DataError(
            f"{label} has dtype {dtype}, which is no model input; store floats, integers, booleans or uint8."
        )


def check_rank(rank: int, label: str) -> None:
    """Raises DataError unless MegEngine has tensors of ``rank`` axes."""
    if rank > MAX_RANK:
        raise DataError(
            f"{label} has {rank} axes, and MegEngine's tensors have at most {MAX_RANK}: reshape the array."
        )


def to_input(array: np.ndarray, label: str) -> np.ndarray:
    """Copies an array to a dtype of MegEngine.

    Floats and uint8 become float32. 64-bit integers and uint32 become int32, since MegEngine lacks wider
    integers and would wrap large values silently. Booleans and other integers keep their dtype.

    Args:
        array: any array.
        label: the name of the array in errors.
    """
    dtype = array.dtype
    check_dtype(dtype, label)
    check_rank(array.ndim, label)
    if dtype.kind == "f" or dtype == np.uint8:
        with np.errstate(over="ignore"):  # an overflow becomes Inf, which the observers report
            return np.array(array, dtype=np.float32, order="C")
    if dtype.kind == "b" or dtype.itemsize < 4 or dtype == np.int32:
        return np.array(array, dtype=dtype.newbyteorder("="), order="C")
    if array.size and (array.max() > _INT32.max or array.min() < _INT32.min):
        raise DataError(f"{label} has {dtype} values beyond 32 bits, which MegEngine cannot hold.")
    return np.array(array, dtype=np.int32, order="C")


_IMAGE = (
    "make an N x C x H x W array of it and normalize it as in training: "
    "np.asarray(image, np.float32).transpose(2, 0, 1)[None]"
)


def read_array(value: Any, index: int) -> np.ndarray:
    """Returns the numbers of an array, a list of numbers, or a tensor of torch on any device.

    Args:
        value: one input of a batch.
        index: the number of the batch, for messages.

    Raises:
        CalibrationError: for anything else, with what to give instead.
    """
    if isinstance(value, (str, bytes, os.PathLike)):
        raise CalibrationError(f"batch {index} holds the path {_path(value)}: give the arrays, {_READ}.")
    library = type(value).__module__.partition(".")[0]
    if library == "PIL":
        raise CalibrationError(f"batch {index} holds an image of PIL: {_IMAGE}.")
    if library == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise CalibrationError(f"batch {index} is ragged: every array needs one shape.") from error
    if array.dtype == object or array.dtype.kind not in "fiub":
        more = f" ({type(value).__name__}; {_COLUMNS})" if _is_table(value) else ""
        raise CalibrationError(f"batch {index} holds {array.dtype} values: give arrays of numbers{more}.")
    return array


_READ = "read from it, or let the command line read it (--data)"
_COLUMNS = "choose columns of numbers: table[columns].to_numpy(np.float32)"


def what_is_no_iterable(batches: Any) -> str:
    """Returns what an object is that iterates over something else than batches, and a cure; "" for others."""
    if isinstance(batches, (str, bytes, os.PathLike)):
        return f"the path {_path(batches)}: give an iterable of batches, such as a list of arrays, {_READ}"
    if _is_table(batches):
        name = type(batches).__name__
        return f"a {name}, which iterates over columns: give [table[columns].to_numpy(np.float32)]"
    if hasattr(batches, "shape") and hasattr(batches, "dtype"):
        return f"one {type(batches).__name__}: give an iterable of batches, such as a list of arrays"
    return ""


def _is_table(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def _path(value: Any) -> str:
    return repr(os.fsdecode(value))


_READ_VALUES = 4096  # of an input of a sample, evenly spread
LEAST_VALUES, _LEAST_FLOATS = 16, 4  # of a sample: a few numbers may be alike by chance


def fingerprint_samples(batch: Any) -> list[bytes]:
    """Returns a fingerprint of each sample of a batch; none of a batch whose samples are a few numbers.

    Args:
        batch: an array or Tensor, a tuple of them, or a dict of them by name.
    """
    values = batch.values() if isinstance(batch, Mapping) else batch
    listed = list(values) if isinstance(values, Iterable) and not hasattr(values, "shape") else [values]
    if not all(hasattr(value, "shape") for value in listed):
        return []
    arrays = [np.asarray(value.numpy() if hasattr(value, "numpy") else value) for value in listed]
    count = batch_length(tuple(arrays))
    counted = [array for array in arrays if array.ndim and len(array) == count]
    floats = any(array.dtype.kind == "f" for array in counted)
    if sum(array[0].size for array in counted if count) < (_LEAST_FLOATS if floats else LEAST_VALUES):
        return []
    return [_fingerprint([array[index] for array in counted]) for index in range(count)]


def _fingerprint(sample: Sequence[np.ndarray]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in sample:
        digest.update(str((array.shape, array.dtype.str)).encode())
        digest.update(array.reshape(-1)[:: max(1, array.size // _READ_VALUES)].tobytes())
    return digest.digest()


class SampleRecord:
    """The samples that a source has given, by their fingerprints.

    Args:
        source: the data, of which each batch is recorded that an iteration gives from now on.
    """

    def __init__(self, source: DataSource) -> None:
        self._source, self._numbers = source, set[int]()
        self._samples: set[bytes] = set()
        source.listeners.append(self._add)

    def _add(self, number: int, batch: Batch) -> None:
        if number not in self._numbers:
            self._numbers.add(number)
            self._samples.update(fingerprint_samples(batch))

    def share(self, batches: Iterable[Any]) -> float:
        """Returns the share of the samples of ``batches`` that the source has given; 0 for none.

        What other processes have read of the source is read here, too.
        """
        samples = [sample for batch in batches for sample in fingerprint_samples(batch)]
        if not samples:
            return 0.0
        if not self._numbers or (hasattr(self._source, "__len__") and len(self._numbers) < len(self._source)):
            for _ in self._source.numbered(lambda number: number not in self._numbers):
                pass
        return sum(sample in self._samples for sample in samples) / len(samples)
