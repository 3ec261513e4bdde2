"""Opens calibration data, whatever its form, and cuts it into batches of one number of samples."""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qtrace.data.arrays import LABELS, ArraySource, import_object, is_object_name, open_batches
from qtrace.data.base import (
    Batch,
    DataSource,
    DerivedSource,
    SizedSource,
    batch_length,
    length_of_last,
    read_array,
    what_is_no_iterable,
)
from qtrace.data.images import ImageSource
from qtrace.errors import DataError

if TYPE_CHECKING:
    from qtrace.config import Preprocess


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
            place, count = _Number(number), batch_length(batch)
            place.first = number * self.size if self.cut and self.size else first
            first = place.first + count
            if not self.whole or count == self.size:
                yield number if self.size is None else place, batch

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
    """The number of a batch of samples that came in other batches; its text names the first one, too.

    Attributes:
        first: the number of its first sample in the data.
    """

    first = 0

    def __str__(self) -> str:
        return f"{int(self)} (from sample {self.first} of the data)"


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


_FORMS = "an .npy or .npz file, a folder of images, or pkg.mod:loader"


def open_data(
    source: Any,
    *,
    preprocess: Preprocess | None = None,
    batch_size: int = 8,
    max_batches: int | None = None,
    shape: tuple[int, ...] | None = None,
    skip_bad: bool = False,
) -> DataSource:
    """Opens calibration data: checks headers and names now, and reads values at each iteration.

    The forms of ``source``:

    * ``.npy``: one input; its first axis counts the samples.
    * ``.npz``: without arrays called ``y``, ``label(s)`` or ``target(s)``, unless it holds nothing else. One
      array is the first input whatever its name; several are inputs by name, in the order of the file. A
      single number next to arrays, such as a sample rate, is given with each batch.
    * a folder: the images in it and below (png, jpg, jpeg, bmp, webp, ppm), by path. Links that leave the
      folder are refused. ``preprocess`` is needed.
    * ``pkg.mod:loader``: an iterable, or a callable that returns one and is called again for each iteration.
      A batch is a Tensor or array, a tuple of inputs by position, or a dict of inputs by name; it holds no
      labels. ``batch_size`` is ignored.
    * what is in memory: an array or a dict of arrays, whose first axis counts the samples. A list of batches,
      an object whose ``__iter__`` begins anew, or a function that returns an iterable.

    Inputs get a dtype of MegEngine: floats and uint8 become float32. Four-dimensional uint8 arrays, in a
    file or in memory, are raw pixels in the model's order of channels, and normalized if there is a
    ``preprocess``: N x C x H x W, or N x H x W x C if its ``layout`` says so.

    Args:
        source: one of the forms above.
        preprocess: the recipe's ``preprocess``, which converts pixels to inputs.
        batch_size: samples per batch; the last batch may be smaller.
        max_batches: the largest number of batches.
        shape: the shape that samples in a file must have, without the first axis.
        skip_bad: leave unreadable images out, and list them in the source's ``skipped``.

    Returns:
        Batches from the start at each iteration: tuples of arrays, or dicts of arrays by input name. It has a
        length if that is known beforehand.

    Raises:
        DataError: when the source cannot be read; some mistakes appear only at an iteration.
    """
    for name, value in (("batch_size", batch_size), ("max_batches", max_batches)):
        if value is not None and value < 1:
            raise DataError(f"{name} must be at least 1, not {value}.")
    if not isinstance(source, (str, os.PathLike)):
        return open_values(source, batch_size=batch_size, max_batches=max_batches, preprocess=preprocess)
    source = os.fspath(source)
    path = Path(source)
    if source and path.is_dir():
        if preprocess is None:
            raise DataError(
                f"{path} is a folder of images: give --size, --scale, --mean, --std and --channels, or a "
                "recipe with the key `preprocess`."
            )
        return ImageSource(
            path, preprocess=preprocess, batch_size=batch_size, max_batches=max_batches, skip_bad=skip_bad
        )
    if path.suffix.lower() in (".npy", ".npz"):
        if not path.is_file():
            raise DataError(f"There is no file {source}; the data must be {_FORMS}.")
        return ArraySource(
            path, batch_size=batch_size, max_batches=max_batches, shape=shape, preprocess=preprocess
        )
    if is_object_name(source) and not path.exists():
        return open_batches(source, import_object(source), max_batches, preprocess)
    problem = "cannot be read as data" if source and path.exists() else "does not exist"
    raise DataError(f"{source!r} {problem}; give {_FORMS}.")


_LABELS = LABELS | {"gt", "truth"}


def open_values(
    data: Any, *, batch_size: int, max_batches: int | None, preprocess: Preprocess | None = None
) -> DataSource:
    """Opens data that is in memory.

    Args:
        data: one array, or a dict of arrays by input name, whose first axis counts the samples. Or batches:
            a list, an object whose ``__iter__`` begins anew such as a DataLoader, or a function that returns
            an iterable. A batch is an array, a tuple of inputs by position, or a dict of inputs by name. A
            single number next to arrays, such as a sample rate, is given with each batch.
        batch_size: samples per batch of an array.
        max_batches: the largest number of batches.
        preprocess: the recipe's ``preprocess``, which converts uint8 arrays of four axes; None for none.

    Raises:
        DataError: when ``data`` is none of these, or an iterator, which cannot begin anew.
    """
    single = hasattr(data, "shape") and hasattr(data, "dtype")
    if single or isinstance(data, Mapping):
        batches = _cut({"": data} if single else data, batch_size, named=not single)
        source = open_batches(f"the array{'' if single else 's'}", batches, max_batches, preprocess)
        source.cut = True
        return source
    if problem := what_is_no_iterable(data):
        raise DataError(f"data is {problem}.")
    return open_batches("the data", data, max_batches, preprocess)


def _cut(arrays: Mapping[Any, Any], size: int, *, named: bool) -> list[Any]:
    """Cuts arrays with one first axis into batches of at most ``size`` samples; single numbers stay whole."""
    values = {key: read_array(value, 0) for key, value in arrays.items()}
    lengths = {value.shape[0] for value in values.values() if value.ndim}
    if len(lengths) != 1 or not (count := lengths.pop()):
        raise DataError(
            "the arrays of data need one first axis, the samples, of the same length above 0: give "
            "such arrays, or a list of batches."
        )
    starts = range(0, count, size)
    batches = [{k: v[start : start + size] if v.ndim else v for k, v in values.items()} for start in starts]
    return batches if named else [next(iter(batch.values())) for batch in batches]


def find_labels(batch: Batch, inputs: Sequence[str]) -> tuple[int | str, ...]:
    """Returns what a batch holds besides the model's inputs and looks like labels; () for nothing.

    Labels are integers, or have fewer axes than the first input. Of a tuple they are the values after the
    inputs, of a dict the values under other names.

    Args:
        batch: the first batch.
        inputs: the names of the model's inputs.
    """
    keys: list[Any]
    if isinstance(batch, dict):
        keys = [key for key in batch if key not in inputs]
        if len(batch) - len(keys) != len(inputs):
            return ()
    else:
        keys = list(range(len(inputs), len(batch)))
    values: Mapping[Any, np.ndarray] = batch if isinstance(batch, dict) else dict(enumerate(batch))
    axes = next((value.ndim for key, value in values.items() if key not in keys), 0)
    look = all(values[key].dtype.kind in "iub" or values[key].ndim < axes for key in keys)
    return tuple(keys) if look else ()


def names_labels(name: str) -> bool:
    """Returns whether an argument that may be left out is for labels by its name, as ``gt_boxes`` is."""
    return not _LABELS.isdisjoint(name.lower().split("_"))


def without_labels(source: DataSource, labels: tuple[int | str, ...]) -> DataSource:
    """Returns ``source`` without the values that `find_labels` returned."""
    if not labels:
        return source
    kind = _SizedUnlabelled if isinstance(source, SizedSource) else _Unlabelled
    return kind(source, frozenset(labels))


class _Unlabelled(DerivedSource):
    def __init__(self, source: DataSource, labels: frozenset[int | str]) -> None:
        super().__init__(source)
        self.labels = labels

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        for number, batch in self.inner._batches(selects):
            if isinstance(batch, dict):
                yield number, {key: value for key, value in batch.items() if key not in self.labels}
            else:
                yield number, tuple(v for index, v in enumerate(batch) if index not in self.labels)


class _SizedUnlabelled(_Unlabelled, SizedSource):
    def _count(self) -> int:
        assert isinstance(self.inner, SizedSource)
        return self.inner._count()
