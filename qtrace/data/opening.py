"""Opens calibration data, whatever its form.

Data that is in memory: arrays, sequences of batches, loaders, and functions that make batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qtrace.data.arrays import LABELS, ArraySource
from qtrace.data.base import Batch, DataSource, DerivedSource, SizedSource, read_array, what_is_no_iterable
from qtrace.data.images import ImageSource
from qtrace.data.loader import is_object_name, open_batches, open_loader
from qtrace.errors import DataError

if TYPE_CHECKING:
    from qtrace.config import Preprocess

__all__ = ["find_labels", "names_labels", "open_data", "open_values", "without_labels"]

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
        return open_loader(source, max_batches, preprocess)
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
