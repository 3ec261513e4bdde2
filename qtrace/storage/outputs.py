"""Output files and folders: they appear whole or not at all, and replace only what qtrace wrote."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from qtrace import process
from qtrace.errors import QtraceError, refusing, shorten_list
from qtrace.process import undisturbed
from qtrace.storage import files
from qtrace.storage.files import parse_document

__all__ = [
    "PART",
    "WORK",
    "WRITTEN",
    "check_foreign",
    "foreign",
    "foreign_output",
    "has_parts",
    "locked",
    "output_file",
    "output_folder",
    "resumable_folder",
]

WRITTEN = "Written by qtrace"
"""The mark of text files, which stands in a comment of one of the first lines."""

_HEAD = 1024  # bytes of a file, or of a field of an ONNX model, that may hold the mark
_TEXT_MARKS = (
    WRITTEN.encode(),
    b'<meta name="generator" content="qtrace">',
    b'"producer": "qtrace"',
    b'"schema": "qtrace-costs/',
)
_PRODUCER, _METADATA = 2, 14  # fields of ONNX' ModelProto


def foreign(path: Path) -> str:
    """Says that ``path`` is a file which qtrace did not write.

    Args:
        path: the file that is about to be replaced.

    Returns:
        The beginning of a sentence; "" where there is no regular file, for an empty one, and for one that
        carries the mark of qtrace.

    Raises:
        OSError: when the file cannot be read.
    """
    if not path.is_file() or path.stat().st_size == 0 or _is_own(path):
        return ""
    return f"{path} exists, and nothing in it says that qtrace wrote it"


def foreign_output(path: Path, beside: Iterable[Path] = ()) -> str:
    """Says which file of an output of several files qtrace did not write.

    Raw weights and other files next to the named one lack a place for a mark. They belong to qtrace if the
    named file does.

    Args:
        path: the file that the user named, and that is about to be replaced.
        beside: the other files of the output.

    Returns:
        As `foreign`.

    Raises:
        OSError: when a file cannot be read.
    """
    reason = foreign(path)
    if reason or (path.is_file() and path.stat().st_size > 0):
        return reason
    return next((reason for other in beside if (reason := foreign(other))), "")


def _is_own(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(_HEAD)
        if head[:1] == b"\x80":  # a pickle: a pickle of `qtrace.save` begins with its checksum
            return b"qtrace" in head[:16]
        if head[4:8] == b"TFL3":
            return _tflite_description(file).startswith(b"qtrace")
        if head[8:12] == b"mgv2":
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return data.rfind(b'{"qtrace": 1,') >= 0
        if head.startswith(b"7767517\n"):
            return b"\nInput qtrace/" in head
        if any(mark in head for mark in _TEXT_MARKS):
            return True
        if head[:1] == b"{":  # a document of MSC, whose readers accept no other entries than theirs
            prototxt = path.with_suffix(".prototxt")
            return path != prototxt and prototxt.is_file() and _is_own(prototxt)
        return any(_names_qtrace(number, value) for number, value in _onnx_fields(file))


def _names_qtrace(number: int, value: bytes) -> bool:
    """Whether a field of an ONNX model is the producer qtrace, or an entry of its metadata."""
    return value == b"qtrace" if number == _PRODUCER else value[2:].startswith(b"qtrace.")


def _onnx_fields(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yields producer and metadata of an ONNX file, without reading its graph; nothing of other files."""
    size = file.seek(0, 2)
    file.seek(0)
    while file.tell() < size:
        tag = _varint(file)
        length = _varint(file)
        if tag & 7 == 0:  # a number, which has been read
            continue
        if tag & 7 != 2 or file.tell() + length > size:
            return
        if tag >> 3 in (_PRODUCER, _METADATA):
            position = file.tell()
            yield tag >> 3, file.read(min(length, _HEAD))
            file.seek(position)
        file.seek(length, 1)


def _varint(file: BinaryIO) -> int:
    number = shift = 0
    while byte := file.read(1):
        number |= (byte[0] & 127) << shift
        shift += 7
        if byte[0] < 128 or shift > 63:
            break
    return number


def _tflite_description(file: BinaryIO) -> bytes:
    """Returns the description of a TFLite model, or nothing."""

    def number(form: str, position: int) -> int:
        file.seek(position)
        value: int = struct.unpack(form, file.read(struct.calcsize(form)))[0]
        return value

    try:
        root = number("<I", 0)
        table = root - number("<i", root)
        offset = number("<H", table + 10) if number("<H", table) > 10 else 0  # the fourth field
        if not offset:
            return b""
        text = root + offset + number("<I", root + offset)
        return file.read(min(number("<I", text), _HEAD))
    except (struct.error, ValueError):
        return b""


WORK = ".calibration"
"""Where an output folder keeps lock and checkpoints until it is complete."""
PART = ".part.npz"
"""The suffix of a checkpoint of a run that may go on."""


def has_parts(folder: Path) -> bool:
    """Whether ``folder`` holds checkpoints of a run that may go on."""
    return any(folder.glob(f"*{PART}"))


@contextlib.contextmanager
def output_folder(path: Path, *, names: tuple[str, ...], force: bool) -> Iterator[Path]:
    """Yields a folder to fill, which becomes ``path`` when the block ends without an error.

    Args:
        path: the folder to make. It may exist if it is empty.
        names: the files that the block writes. ``force`` replaces only a folder that holds nothing else.
        force: whether to replace a folder, which stays until the new one is complete.

    Raises:
        QtraceError: when ``path`` exists with something in it, or cannot be made.
    """
    target = Path(os.path.realpath(path))
    _check_replaceable(path, target, names, force)
    with _workspace(path, target, path) as folder:
        yield folder
        _replace(path, target, folder)


@contextlib.contextmanager
def resumable_folder(
    path: Path,
    *,
    names: tuple[str, ...],
    force: bool,
    resume: bool,
    note: Callable[[str], None],
) -> Iterator[tuple[Path, Path]]:
    """Yields a folder to fill, as `output_folder` does, and one for checkpoints, which is kept on an error.

    The folder of checkpoints is in ``path``, with a lock, until the first folder replaces ``path``. It is
    removed if it holds no checkpoints.

    Args:
        path: the folder to make.
        names: the files that the block writes into the first folder.
        force: whether to replace a folder, and to drop checkpoints.
        resume: whether to go on from checkpoints, if there are any.
        note: called with messages on stale locks and kept checkpoints.

    Raises:
        QtraceError: when another process writes to ``path``, or for what `output_folder` refuses.
    """
    target = Path(os.path.realpath(path))
    _check_replaceable(path, target, (*names, WORK), force or _unfinished(target))
    with _workspace(path, target, path) as folder:
        created, work = not target.exists(), target / WORK
        with refusing(QtraceError, path, "written"):
            work.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(_remove_empty, work, *([target] if created else []))
            stack.enter_context(locked(work / "lock", str(path), note))
            stack.callback(_remove_work, work)
            _check_checkpoints(path, work, force, resume)
            before = _times(work)
            try:
                yield folder, work
            except BaseException as error:
                refused = isinstance(error, QtraceError) and _times(work) == before
                if has_parts(work) and not refused:
                    note(f"what was done is kept in {path}: go on with resume=True")
                raise
            _replace(path, target, folder)


def _times(work: Path) -> dict[str, int]:
    """Returns the time of change of each checkpoint."""
    return {entry.name: entry.stat().st_mtime_ns for entry in work.iterdir() if entry.is_file()}


def _unfinished(target: Path) -> bool:
    """Whether a folder holds only the checkpoints of an unfinished run."""
    return target.is_dir() and {entry.name for entry in target.iterdir()} <= {WORK}


def _check_checkpoints(path: Path, work: Path, force: bool, resume: bool) -> None:
    """Refuses to drop checkpoints unless ``force`` or ``resume``; drops them with ``force``."""
    if resume or not has_parts(work):
        return
    if not force:
        raise QtraceError(
            f"{path} holds checkpoints of a run that did not end: go on with resume=True, or begin anew with "
            "force=True."
        )
    for entry in work.glob("*.npz"):
        entry.unlink(missing_ok=True)


def _remove_work(work: Path) -> None:
    """Removes ``work`` unless it holds checkpoints."""
    if not has_parts(work):
        shutil.rmtree(work, ignore_errors=True)


def _remove_empty(*folders: Path) -> None:
    """Removes the empty ones of some folders."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _replace(path: Path, target: Path, folder: Path) -> None:
    """Replaces ``target``, which the user names ``path``, by ``folder``, after MegEngine has finished."""
    process.synchronize()
    with refusing(QtraceError, path, "replaced"):
        files.replace_folder(target, folder)


def check_foreign(path: Path, beside: Iterable[Path] = (), *, force: bool) -> None:
    """Refuses to replace a file that qtrace did not write, unless ``force``.

    Args:
        path: the file to write.
        beside: other files that are written with it.
        force: whether to replace any file.

    Raises:
        QtraceError: when ``path`` exists and qtrace did not write it, or when it cannot be read.
    """
    with refusing(QtraceError, path, "read"):
        reason = "" if force else foreign_output(path, beside)
    if reason:
        raise QtraceError(f"{reason}. Name another file, or replace it with force=True.")


@contextlib.contextmanager
def output_file(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yields a path to write to, which becomes ``path`` when the block ends without an error.

    Other files that the block writes next to it move with it, as some formats consist of several files.

    Args:
        path: the file to write.
        force: whether to replace files that qtrace did not write, too.

    Raises:
        QtraceError: when ``path`` exists and is no file, or cannot be written, or for what `check_foreign`
            refuses.
    """
    target = Path(os.path.realpath(path))
    # As root, even /dev/null could be replaced.
    if kind := files.kind_of(target, "a device or a pipe, which cannot be replaced"):
        raise QtraceError(f"{path} is {kind}; name a file.")
    check_foreign(path, force=force)
    with _workspace(path, target, path.parent) as folder:
        yield folder / target.name
        process.synchronize()
        check_foreign(path, (path.parent / file.name for file in folder.iterdir()), force=force)
        with refusing(QtraceError, path, "replaced"), undisturbed():  # several files change together
            for file in sorted(folder.iterdir(), key=lambda file: file.name == target.name):
                os.replace(file, target.parent / file.name)


def _check_replaceable(path: Path, target: Path, names: tuple[str, ...], force: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise QtraceError(f"{path} is a file; name a folder.")
    others = sorted(entry.name for entry in target.iterdir())
    if others and not force:
        raise QtraceError(
            f"{path} exists and is not empty; name another folder, or replace it with force=True."
        )
    others = [name for name in others if name not in names]
    if others:
        raise QtraceError(
            f"{path} holds files that are not ours ({shorten_list(others)}); force=True does not remove them."
        )


@contextlib.contextmanager
def _workspace(path: Path, target: Path, shown: Path) -> Iterator[Path]:
    """Yields a folder next to the target, on the same file system, and removes it at the end.

    Errors name the folder ``shown`` in its place.
    """
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.sweep(target)
        folder, lock = files.claim(target, Path.mkdir)
    except (FileExistsError, NotADirectoryError) as error:
        raise QtraceError(f"{path} cannot be written: {error.filename} is a file, not a folder.") from error
    except OSError as error:
        raise QtraceError(f"{path} cannot be written: {error.strerror}.") from error
    try:
        yield folder
    except OSError as error:
        if not str(error.filename or folder).startswith(str(folder)):
            raise
        raise QtraceError(f"{path} cannot be written: {error.strerror or error}.") from error
    except QtraceError as error:
        if isinstance(cause := error.__cause__, OSError) and str(folder) in str(error):
            raise QtraceError(f"{path} cannot be written: {cause.strerror or cause}.") from error
        with files.naming(folder, shown):
            raise
    finally:
        with undisturbed():
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            _remove_empty(*missing)


@contextmanager
def locked(path: Path, subject: str, note: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Holds the lock file ``path`` inside the block.

    The operating system releases the lock when the process ends, however it ends. A lock file that nobody has
    locked is therefore stale and is taken over, unless it comes from another host, whose locks are not seen.

    Args:
        path: the lock file; it is removed at the end.
        subject: the locked folder or run, as messages name it.
        note: called with a message when a stale lock is taken over.

    Raises:
        QtraceError: when another process holds the lock; the message names process and host. Also when the
            lock cannot be written.
    """
    with refusing(QtraceError, subject, "locked"):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            removed = not path.exists() or path.stat().st_ino != os.fstat(handle).st_ino
            if removed:  # its owner ended between opening and locking
                raise OSError
        except OSError:
            raise QtraceError(
                f"{subject} is being written by {_describe(_read(handle))}: wait until that ends, or name "
                "another folder."
            ) from None
        owner = _read(handle)
        if owner and owner.get("host") != socket.gethostname():
            raise QtraceError(
                f"{subject} was locked by {_describe(owner)}, of which nothing is known here: remove {path} "
                "if that process has ended."
            )
        if owner:
            note(f"the lock of {_describe(owner)}, which has ended, was taken over")
        try:
            _write(handle, subject)
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _write(handle: int, subject: str) -> None:
    """Writes down who holds the lock."""
    record = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    with refusing(QtraceError, subject, "locked"):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(record).encode(), 0)


def _read(handle: int) -> dict[str, Any]:
    try:
        return parse_document(os.pread(handle, 4096, 0) or b"{}")
    except ValueError:
        return {"pid": "unknown", "host": socket.gethostname()}


def _describe(owner: dict[str, Any]) -> str:
    since = f", since {owner['since']}" if "since" in owner else ""
    return f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}{since}"
