"""Signals that end a process, and the lines that C libraries print to stderr."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

__all__ = ["caught_lines", "undisturbed"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores Ctrl-C, SIGTERM and SIGHUP inside the block, so that cleanup code completes."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


_STDERR = 2
_alone = threading.Lock()  # the file descriptor belongs to the whole process


@contextlib.contextmanager
def caught_lines(starts: tuple[str, ...]) -> Iterator[list[str]]:
    """Keeps lines that begin with one of ``starts`` out of file descriptor 2.

    Yields:
        A list that holds these lines after the block; all other lines go to stderr. It stays empty if there
        is no stderr.

    Raises:
        OSError: when no file handle is free.
    """
    lines: list[str] = []
    with _alone, contextlib.ExitStack() as stack:
        if _is_open():
            caught = stack.enter_context(tempfile.TemporaryFile())
            stack.callback(_restore_stderr, os.dup(_STDERR), caught, starts, lines)
            _flush()
            os.dup2(caught.fileno(), _STDERR)
        yield lines


def _is_open() -> bool:
    try:
        os.fstat(_STDERR)
    except OSError:
        return False
    return True


def _restore_stderr(original: int, caught: IO[bytes], starts: tuple[str, ...], lines: list[str]) -> None:
    _flush()
    os.dup2(original, _STDERR)
    os.close(original)
    caught.seek(0)
    for line in caught.read().decode("utf-8", "surrogateescape").splitlines(keepends=True):
        if line.startswith(starts):
            lines.append(line.rstrip())
        else:
            with contextlib.suppress(OSError):  # a full disk
                os.write(_STDERR, line.encode("utf-8", "surrogateescape"))


def _flush() -> None:
    """Writes Python's buffered text before the file descriptor changes."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
