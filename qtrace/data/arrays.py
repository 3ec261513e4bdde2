"""Inputs from .npy and .npz files, read batch by batch, and from the user's own code."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import math
import os
import re
import traceback
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from qtrace import plugins
from qtrace.data.base import (
    GIVE_BATCHES,
    NO_EMPTY_AXES,
    Batch,
    DataSource,
    SizedSource,
    check_dtype,
    check_rank,
    file_identity,
    to_input,
)
from qtrace.data.images import are_pixels, check_channels, convert, find_pixels
from qtrace.errors import DataError, QtraceError, Terminated

if TYPE_CHECKING:
    from qtrace.config import Preprocess

LABELS = frozenset({"y", "label", "labels", "target", "targets"})
"""Names of label arrays in an .npz, in lower case, which are no inputs."""

_BAD_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
_MAX_DEFLATE_RATIO = 1100  # deflate reaches at most 1032
_READERS: dict[tuple[int, int], Callable[[IO[bytes]], Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclasses.dataclass(frozen=True)
class _Array:
    """One stored array, whose header was checked against the size of the file."""

    path: Path
    member: str | None  # within an .npz
    label: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    offset: int

    @property
    def key(self) -> str:
        return (self.member or "").removesuffix(".npy")

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def batches(self, size: int, archive: zipfile.ZipFile | None) -> Iterator[np.ndarray]:
        """Yields consecutive samples; the last batch may be smaller.

        Args:
            size: samples per batch.
            archive: the open .npz file that holds the array; None for an .npy file.
        """
        with _open(self.path, self.member, archive) as stream:
            stream.read(self.offset)
            if not self.shape:  # a setting, which every batch has
                data = stream.read(self.dtype.itemsize)
                yield from itertools.repeat(np.frombuffer(data, self.dtype).reshape(()))
            total = self.shape[0]
            if self.fortran:  # the samples are interleaved
                whole = self._read(stream, total)
                for start in range(0, total, size):
                    yield whole[start : start + size]
                return
            for start in range(0, total, size):
                yield self._read(stream, min(size, total - start))

    def _read(self, stream: IO[bytes], count: int) -> np.ndarray:
        size = count * self.sample_bytes
        _check_memory(size, self.label)
        data = stream.read(size)
        if len(data) != size:
            raise DataError(f"{self.label} is truncated: its header declares more values than there are.")
        shape = (count, *self.shape[1:])
        return np.frombuffer(data, self.dtype).reshape(shape, order="F" if self.fortran else "C")


class ArraySource(SizedSource):
    """The arrays of one .npy or .npz file; the first axis counts the samples.

    A single number next to arrays, such as a sample rate, is given with each batch.
    """

    def __init__(
        self,
        path: Path,
        *,
        batch_size: int,
        max_batches: int | None,
        shape: tuple[int, ...] | None,
        preprocess: Preprocess | None,
    ) -> None:
        super().__init__(str(path), max_batches)
        self.cut = True
        self._batch_size = batch_size
        self._preprocess = preprocess
        self._path, self._zipped = path, path.suffix.lower() == ".npz"
        arrays = _npz_headers(path) if self._zipped else [_header(path, None, None)]
        self._arrays = self._without_labels(arrays)
        counted = [array for array in self._arrays if array.shape]
        if not counted:
            raise DataError(
                f"{self._arrays[0].label} is a single number; the first axis must count the samples."
            )
        self._samples = counted[0].shape[0]
        _check_samples(self.source, counted, shape)
        self.pixels = any(self._is_pixels(array) for array in self._arrays)
        for array in self._arrays:
            if preprocess is not None and self._is_pixels(array):
                check_channels(array.shape, array.label, preprocess)

    def _without_labels(self, arrays: list[_Array]) -> list[_Array]:
        if len(arrays) == 1:
            return arrays
        inputs = [array for array in arrays if array.key.lower() not in LABELS]
        self.skipped = [array.key for array in arrays if array.key.lower() in LABELS]
        if not inputs:
            raise DataError(f"{self.source} holds only labels ({', '.join(self.skipped)}) and no input.")
        return inputs

    def _is_pixels(self, array: _Array) -> bool:
        return are_pixels(array.dtype, len(array.shape), self._preprocess)

    def _count(self) -> int:
        return math.ceil(self._samples / self._batch_size)

    def identity(self) -> str:
        """Returns the path with size and time of change."""
        return f"{self.source} {file_identity(Path(self.source))}"

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        with _archive(self._path) if self._zipped else contextlib.nullcontext() as archive:
            streams = [array.batches(self._batch_size, archive) for array in self._arrays]
            for number in range(self._count()):
                rows = [next(stream) for stream in streams]
                if not selects(number):
                    continue
                values = [self._input(array, row) for array, row in zip(self._arrays, rows, strict=True)]
                if len(values) == 1:
                    yield number, (values[0],)
                else:
                    named = zip(self._arrays, values, strict=True)
                    yield number, {array.key: value for array, value in named}

    def _input(self, array: _Array, rows: np.ndarray) -> np.ndarray:
        if self._preprocess is not None and self._is_pixels(array):
            return convert(rows, self._preprocess)
        return to_input(rows, array.label)


def _npz_headers(path: Path) -> list[_Array]:
    with _archive(path) as archive:
        members = [info for info in archive.infolist() if not info.is_dir()]
        if not members:
            raise DataError(f"{path} holds no array.")
        names = Counter(info.filename.removesuffix(".npy") for info in members)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise DataError(f"{path} holds more than one array called {twice[0]!r}; keep one of them.")
        return [_header(path, info, archive) for info in members]


def _header(path: Path, info: zipfile.ZipInfo | None, archive: zipfile.ZipFile | None) -> _Array:
    """Reads one header and compares it with the number of bytes that the file has for the array."""
    member = info.filename if info else None
    label = f"{path}[{member.removesuffix('.npy')}]" if member else str(path)
    with _open(path, member, archive) as stream:
        try:
            reader = _READERS[np.lib.format.read_magic(stream)]  # type: ignore[no-untyped-call]
            shape, fortran, dtype = reader(stream)
        except (*_BAD_ZIP, OSError):
            raise
        except Exception as error:  # numpy may raise anything for bytes that are no header
            raise DataError(
                f"{label} is not an array in NumPy's .npy format; write it with numpy.save."
            ) from error
        offset = stream.tell()
    if dtype.hasobject:
        raise DataError(f"{label} holds Python objects, which only pickle could load; store plain numbers.")
    check_dtype(dtype, label)
    check_rank(len(shape), label)
    if min(shape, default=1) <= 0:
        raise DataError(f"{label} is empty: its shape is {shape}; {NO_EMPTY_AXES}.")
    declared = offset + math.prod(shape) * dtype.itemsize
    stored = info.file_size if info else path.stat().st_size
    if info and stored > max(info.compress_size * _MAX_DEFLATE_RATIO, 4096):
        raise DataError(f"{label} claims {stored} bytes in {info.compress_size}: the file is damaged.")
    if declared != stored:
        raise DataError(
            f"{label} is truncated or damaged: shape {shape} of {dtype} takes {declared} bytes, "
            f"the file has {stored}."
        )
    return _Array(path, member, label, shape, dtype, fortran, offset)


@contextlib.contextmanager
def _open(path: Path, member: str | None, archive: zipfile.ZipFile | None) -> Iterator[IO[bytes]]:
    """Opens a file, or a member of an .npz, and raises its errors as a DataError."""
    try:
        if member is None or archive is None:
            with path.open("rb") as stream:
                yield stream
        else:
            with _part(archive, member) as part:
                yield part
    except _BAD_ZIP as error:
        raise DataError(f"{path}: {member or 'the file'} cannot be read, it is damaged ({error}).") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _archive(path: Path) -> zipfile.ZipFile:
    """Opens an .npz file.

    Raises:
        DataError: when it cannot be read, or is no zip archive.
    """
    try:
        with _names():
            return zipfile.ZipFile(path)
    except _BAD_ZIP as error:
        raise DataError(f"{path} is not a whole .npz file ({error}).") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _part(archive: zipfile.ZipFile, member: str) -> IO[bytes]:
    with _names():
        return archive.open(member)


@contextlib.contextmanager
def _names() -> Iterator[None]:
    """Raises BadZipFile for names that are not UTF-8: zipfile decodes them at several places."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise zipfile.BadZipFile("a name in it is not UTF-8") from error


def _check_samples(source: str, arrays: list[_Array], shape: tuple[int, ...] | None) -> None:
    counts = {array.key: array.shape[0] for array in arrays}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{key}: {count}" for key, count in counts.items())
        raise DataError(
            f"{source} has different numbers of samples ({listed}): keep only the model's inputs in it, or "
            f"{GIVE_BATCHES}."
        )
    if shape is not None and arrays[0].shape[1:] != shape:
        raise DataError(f"{arrays[0].label} has samples of shape {arrays[0].shape[1:]}, not {shape}.")


def _check_memory(size: int, label: str) -> None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return
    if size > total // 2:
        raise DataError(f"{label} needs {size / 2**30:.1f} GiB at once; use smaller batches or samples.")


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
        pixels = None if self._preprocess is None else find_pixels(arrays, self._preprocess)
        inputs = []
        for number, (array, label) in enumerate(zip(arrays, labels, strict=True)):
            if number == pixels and self._preprocess is not None:
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
