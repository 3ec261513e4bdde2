"""Inputs from the user's own code, and the import of ``pkg.mod:name`` that the command line uses too."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from qtrace import plugins
from qtrace.data.base import NO_EMPTY_AXES, Batch, DataSource, SizedSource, to_input
from qtrace.data.pixels import check_channels, convert, find_pixels
from qtrace.errors import DataError, QtraceError, Terminated

if TYPE_CHECKING:
    from qtrace.config import Preprocess

__all__ = ["blame", "import_object", "is_installed", "is_object_name", "open_batches", "open_loader"]

_END = object()
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_object_name(text: str) -> bool:
    """Whether a text has the form ``pkg.mod:name``."""
    return _NAME.fullmatch(text) is not None


def is_installed(module: str) -> bool:
    """Whether there is a module of this dotted name, without running it; its parent packages run."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of a parent package
        return False


def import_object(name: str) -> Any:
    """Imports the object ``pkg.mod:name``; searches the current folder first, as ``python -m`` does.

    Raises:
        DataError: when there is no such module or name, or importing the module fails.
    """
    module, _, attribute = name.partition(":")
    plugins.search_current_folder()
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise DataError(blame(name, "importing its module", error)) from error
        raise DataError(f"{name}: there is no module {error.name!r} here or in PYTHONPATH.") from error
    except Terminated:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(blame(name, "importing its module", error)) from error
    try:
        return reduce(getattr, attribute.split("."), imported)
    except AttributeError:
        raise DataError(f"{name}: module {module!r} lacks {attribute!r}.") from None


def blame(name: str, doing: str, error: BaseException) -> str:
    """Writes one line for an exception of the user's code, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    user_frames = [
        frame
        for frame in frames
        if not frame.filename.startswith((package, "<frozen")) and os.sep + "importlib" not in frame.filename
    ]
    line = f" at {user_frames[-1].filename}:{user_frames[-1].lineno}" if user_frames else ""
    detail = " ".join(str(error).split())
    return f"{name}: {doing} raised {type(error).__name__}{f': {detail}' if detail else ''}{line}."


def open_loader(name: str, max_batches: int | None, preprocess: Preprocess | None = None) -> DataSource:
    """Opens the batches of ``pkg.mod:name``, an iterable or a callable that returns one."""
    return open_batches(name, import_object(name), max_batches, preprocess)


def open_batches(
    name: str, target: Any, max_batches: int | None, preprocess: Preprocess | None = None
) -> DataSource:
    """Opens ``target``, an iterable of batches or a callable that returns one.

    Args:
        name: what messages call it.
        target: the iterable or the callable.
        max_batches: the largest number of batches.
        preprocess: the recipe's ``preprocess``, which converts uint8 arrays of four axes; None for none.

    Raises:
        DataError: when ``target`` is neither, or can be iterated only once.
    """
    if _is_iterable(target):
        if iter(target) is target:
            raise DataError(
                f"{name} can be iterated only once; name the function that makes it, to be called again."
            )
        kind = _SizedLoaderSource if hasattr(target, "__len__") else _LoaderSource
        return kind(name, lambda: target, max_batches, preprocess)
    if callable(target):
        return _LoaderSource(name, target, max_batches, preprocess)
    raise DataError(f"{name} is neither iterable nor a function that returns batches.")


def _is_iterable(value: Any) -> bool:
    return not isinstance(value, type) and (hasattr(value, "__iter__") or hasattr(value, "__getitem__"))


class _LoaderSource(DataSource):
    def __init__(
        self, name: str, make: Callable[[], Any], max_batches: int | None, preprocess: Preprocess | None
    ) -> None:
        super().__init__(name, max_batches)
        self._make, self._preprocess = make, preprocess

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        batches = self._call("calling it", self._make)
        if not _is_iterable(batches):
            raise DataError(f"{self.source} returned {type(batches).__name__}, not batches to iterate over.")
        iterator = self._call("iterating over it", lambda: iter(batches))
        for index in itertools.count():
            batch = self._call(f"making batch {index}", lambda: next(iterator, _END))
            if batch is _END:
                return
            yield index, self._to_batch(batch, f"{self.source}, batch {index}")

    def _to_batch(self, batch: Any, label: str) -> Batch:
        if isinstance(batch, Mapping):
            if not batch:
                raise DataError(f"{label} is an empty dict.")
            labels = [f"{label}[{key!r}]" for key in batch]
            inputs = self._to_inputs(list(batch.values()), labels, label)
            return dict(zip(map(str, batch), inputs, strict=True))
        if isinstance(batch, list | tuple):
            if not batch:
                raise DataError(f"{label} is an empty {type(batch).__name__}.")
            return tuple(self._to_inputs(batch, [f"{label}[{index}]" for index in range(len(batch))], label))
        return tuple(self._to_inputs([batch], [label], label))

    def _to_inputs(self, values: Sequence[Any], labels: Sequence[str], batch: str) -> list[np.ndarray]:
        """Converts what a loader gives to inputs."""
        arrays = [_to_array(value, label) for value, label in zip(values, labels, strict=True)]
        found = None if self._preprocess is None else find_pixels(arrays, self._preprocess)
        inputs = []
        for number, (array, label) in enumerate(zip(arrays, labels, strict=True)):
            if number == found and self._preprocess is not None:
                self.pixels = True
                check_channels(array.shape, label, self._preprocess)
                inputs.append(convert(array, self._preprocess))
            else:
                inputs.append(to_input(array, label))
        if not any(value.ndim for value in inputs):  # next to arrays they are settings, such as a sample rate
            raise DataError(f"{batch} is a single number; the first axis must count at least one sample.")
        return inputs

    def _call(self, doing: str, call: Callable[[], Any]) -> Any:
        """Calls the user's code, and translates its errors."""
        try:
            return call()
        except (QtraceError, Terminated):
            raise
        except (Exception, SystemExit) as error:
            raise DataError(blame(self.source, doing, error)) from error


class _SizedLoaderSource(_LoaderSource, SizedSource):
    def _count(self) -> int:
        return len(self._make())


def _to_array(value: Any, label: str) -> np.ndarray:
    """Converts a number, or any tensor with ``numpy()``, to a numpy array."""
    if isinstance(value, (int, float, np.number, np.bool_)):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        if not callable(getattr(value, "numpy", None)):
            raise DataError(
                f"{label} is of type {type(value).__name__}; give Tensors or arrays, or tuples or dicts."
            )
        try:
            value = np.asarray(value.numpy())
        except Terminated:
            raise
        except (Exception, SystemExit) as error:
            raise DataError(blame(label, "numpy()", error)) from error
    if value.shape and not value.shape[0]:
        raise DataError(f"{label} has shape {value.shape}; the first axis must count at least one sample.")
    if not value.size:
        raise DataError(f"{label} has shape {value.shape} without a value; {NO_EMPTY_AXES}.")
    return value
