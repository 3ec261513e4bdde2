"""Writes files and folders that appear whole or not at all, and removes what killed processes left.

A process writes to a temporary file next to the target, waits until that is on the disk, and renames it
(`replacing`). It locks the temporary file (`claim`), and the operating system releases the lock when the
process ends, however it ends. So a temporary file that is not locked is a leftover, which the next process
that writes to the same target removes (`sweep`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from qtrace.errors import ExportError, QtraceError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux' renameat2
_MAX_BYTES = 2**31  # of protobuf and FlatBuffers files, whose lengths and offsets have 31 bits


def problem(path: str | os.PathLike[str]) -> str:
    """Returns why no file can have the name ``path``, or "" for a valid name."""
    try:
        if b"\0" not in os.fsencode(path):
            return ""
    except UnicodeEncodeError:
        pass
    return f"{os.fspath(path)!a} cannot be the name of a file: it has a character that no file name has."


def kind_of(path: Path, special: str = "a device or a pipe") -> str:
    """Says what stands at ``path`` in place of a regular file.

    Args:
        path: the path to check.
        special: the words for a device, a pipe or a socket.

    Returns:
        "a folder" or ``special``; "" for a regular file, and where there is nothing.

    Raises:
        OSError: when the system cannot read the path.
    """
    if not path.exists() or path.is_file():
        return ""
    return "a folder" if path.is_dir() else special


def check_size(path: Path, kind: str) -> None:
    """Refuses a protobuf or FlatBuffers file that is missing or larger than such a file can be.

    Args:
        path: the file, which is not read.
        kind: the kind of file, for the message: ``ONNX``.

    Raises:
        ExportError: when the file is missing or too large.
    """
    if not path.is_file():
        raise ExportError(f"{path} does not exist: export the module first.")
    size = path.stat().st_size
    if size >= _MAX_BYTES:
        raise ExportError(
            f"{path} has {size / 2**30:.1f} GiB, and an {kind} file less than {_MAX_BYTES >> 30} GiB: it is "
            "damaged or of another kind; export the module again."
        )


@contextlib.contextmanager
def naming(folder: Path, shown: Path = Path()) -> Iterator[None]:
    """Names ``shown`` in errors in the place of a temporary folder; of its files only the names without."""
    try:
        yield
    except QtraceError as error:
        own = "" if shown == Path() else f"{shown}{os.sep}"
        error.args = tuple(str(text).replace(f"{folder}{os.sep}", own) for text in error.args)
        raise


@contextlib.contextmanager
def replacing(*targets: Path) -> Iterator[tuple[BinaryIO, ...]]:
    """Opens one temporary file next to each target; they take the targets' places together at the end.

    When the block ends, each file is written to the disk before the first one is renamed. When it raises, the
    targets are as they were.

    Args:
        targets: the files to write, in the order in which they are renamed.

    Raises:
        OSError: when a file cannot be written or renamed.
    """
    with contextlib.ExitStack() as stack:
        partials, streams = [], []
        for target in targets:
            sweep(target)
            partial, lock = claim(target, lambda new: new.touch(exist_ok=False))
            stack.callback(os.close, lock)
            stack.callback(_remove, partial)
            partials.append(partial)
            streams.append(stack.enter_context(partial.open("wb")))
        yield tuple(streams)
        for stream in streams:
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        for partial, target in zip(partials, targets, strict=True):
            os.replace(partial, target)
    for folder in {target.parent for target in targets}:
        _sync(folder)


def replace_folder(target: Path, folder: Path) -> None:
    """Renames ``folder`` to ``target``; if that fails, an old ``target`` is back in its place.

    Raises:
        OSError: when it cannot be renamed.
    """
    if not target.exists():
        os.rename(folder, target)
        return
    if _exchange(target, folder):
        return
    old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    os.rename(target, old)
    try:
        os.rename(folder, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def claim(target: Path, make: Callable[[Path], None]) -> tuple[Path, int]:
    """Makes a temporary file or folder next to ``target`` that no `sweep` of another process removes.

    Args:
        target: the file or folder that the temporary one will replace.
        make: makes a file or a folder at a path where there is none, such as ``Path.mkdir``.

    Returns:
        The path, and a file handle that holds the lock until it is closed.

    Raises:
        OSError: when nothing can be made there, or nothing stays there.
    """
    for _ in range(tempfile.TMP_MAX):
        path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        make(path)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process swept it before it was locked
            continue
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                return path, handle
        os.close(handle)
    raise FileNotFoundError(f"{target.parent} does not keep a temporary file")


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yields a folder next to ``target``, which is removed at the end, and which errors do not name.

    If this process is killed, the next one that writes to ``target`` removes it.

    Raises:
        OSError: when no folder can be made there.
    """
    sweep(target)
    folder, lock = claim(target, Path.mkdir)
    try:
        with naming(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def parse_document(text: str | bytes) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        ValueError: when the text is anything else, such as lists that are nested too deeply.
    """
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    return document


def sweep(target: Path) -> None:
    """Removes what killed processes left next to ``target``.

    Args:
        target: the file or folder that those processes were writing.
    """
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.????????.tmp"):
        with contextlib.suppress(OSError):  # it is locked, gone, or not ours
            handle = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if leftover.is_dir():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink()
            finally:
                os.close(handle)


def _remove(partial: Path) -> None:
    """Removes a temporary file that did not become its target."""
    with contextlib.suppress(OSError):
        partial.unlink()


def _sync(folder: Path) -> None:
    """Makes the new names in a folder durable, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders in one step if the system can, so that both names exist at every moment."""
    function = getattr(ctypes.CDLL(None), "renameat2", None)
    if function is None:
        return False
    paths = os.fsencode(first), os.fsencode(second)
    return bool(function(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)
