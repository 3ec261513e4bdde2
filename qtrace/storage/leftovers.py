"""Temporary files and folders beside an output, and what killed processes left of them.

A process locks what it makes (`claim`), and the operating system lets go of the lock when the process ends,
however it ends. So what is there and not locked is a leftover, which the next process that writes to the same
place removes (`sweep`).
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["claim", "problem", "sweep"]

_ATTEMPTS = 100


def problem(path: str | os.PathLike[str]) -> str:
    """Why no file can have the name ``path``; "" for a name that one can have."""
    try:
        if b"\0" not in os.fsencode(path):
            return ""
    except UnicodeEncodeError:
        pass
    return f"{os.fspath(path)!a} cannot be the name of a file: it has a character that no file name has."


def claim(target: Path, make: Callable[[Path], None]) -> tuple[Path, int]:
    """Makes a temporary file or folder beside ``target`` that no `sweep` of another process removes.

    Args:
        target: what the temporary one will replace.
        make: makes a file or a folder at a path where there is none, such as ``Path.mkdir``.

    Returns:
        The path, and a file handle that holds the lock until it is closed.

    Raises:
        OSError: when nothing can be made there.
    """
    for _ in range(_ATTEMPTS):
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


def sweep(target: Path) -> None:
    """Removes what killed processes left beside ``target``.

    Args:
        target: the output that they were to write.
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
