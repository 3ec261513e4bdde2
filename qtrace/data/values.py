"""Data that is in memory: arrays, sequences of batches, loaders, and functions that make batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qtrace.data.arrays import LABELS
from qtrace.data.base import Batch, DataSource, DerivedSource, SizedSource
from qtrace.data.foreign import read_array, what_is_no_iterable
from qtrace.data.loader import open_batches
from qtrace.errors import DataError

if TYPE_CHECKING:
    from qtrace.config import Preprocess

__all__ = ["find_labels", "names_labels", "open_values", "without_labels"]

_LABELS = LABELS | {"gt", "truth"}


def open_values(
    data: Any, *, batch_size: int, max_batches: int | None, preprocess: Preprocess | None = None
) -> DataSource:
    """Opens data that is in memory.

    Args:
        data: one array, or a dict of arrays by input name, whose first axis counts the samples; or batches:
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
        self._labels = labels

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        for number, batch in self.inner._batches(selects):
            if isinstance(batch, dict):
                yield number, {key: value for key, value in batch.items() if key not in self._labels}
            else:
                yield number, tuple(v for index, v in enumerate(batch) if index not in self._labels)


class _SizedUnlabelled(_Unlabelled, SizedSource):
    def _count(self) -> int:
        assert isinstance(self.inner, SizedSource)
        return self.inner._count()
