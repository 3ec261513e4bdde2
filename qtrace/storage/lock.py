"""A lock on a folder: one run at a time writes to it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qtrace.errors import QtraceError
from qtrace.storage.files import parse_document

__all__ = ["locked"]


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
    handle = _open(path, subject)
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


def _open(path: Path, subject: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise QtraceError(f"{subject} cannot be locked: {error.strerror}.") from error


def _write(handle: int, subject: str) -> None:
    """Writes down who holds the lock."""
    record = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(record).encode(), 0)
    except OSError as error:
        raise QtraceError(f"{subject} cannot be locked: {error.strerror}.") from error


def _read(handle: int) -> dict[str, Any]:
    try:
        return parse_document(os.pread(handle, 4096, 0) or b"{}")
    except ValueError:
        return {"pid": "unknown", "host": socket.gethostname()}


def _describe(owner: dict[str, Any]) -> str:
    since = f", since {owner['since']}" if "since" in owner else ""
    return f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}{since}"
