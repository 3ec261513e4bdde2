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

__all__ = ["locked"]


@contextmanager
def locked(path: Path, what: str, note: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Holds the lock file ``path`` inside.

    The operating system lets go of it when the process ends, however it ends. So a file that is there but not
    locked is a stale one, which is taken over; only one of another host may be held without our seeing it.

    Args:
        path: the lock file; it is removed at the end.
        what: what is locked, for messages.
        note: is told when a stale lock was taken over.

    Raises:
        QtraceError: when another process holds it, naming process and host.
    """
    handle = _open(path, what)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = not path.exists() or path.stat().st_ino != os.fstat(handle).st_ino
            if gone:  # its owner ended, and removed it, between our two steps
                raise OSError
        except OSError:
            raise QtraceError(
                f"{what} is being written by {_name(_read(handle))}: wait until that ends, or name another "
                "folder."
            ) from None
        owner = _read(handle)
        if owner and owner.get("host") != socket.gethostname():
            raise QtraceError(
                f"{what} was locked by {_name(owner)}, of which nothing is known here: remove {path} if that "
                "process has ended."
            )
        if owner:
            note(f"the lock of {_name(owner)}, which has ended, was taken over")
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(mine).encode(), 0)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _open(path: Path, what: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise QtraceError(f"{what} cannot be locked: {error.strerror}.") from error


def _read(handle: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(handle, 4096, 0) or b"{}")
    except ValueError:
        return {"pid": "unknown", "host": socket.gethostname()}
    return found if isinstance(found, dict) else {}


def _name(owner: dict[str, Any]) -> str:
    since = f", since {owner['since']}" if "since" in owner else ""
    return f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}{since}"
