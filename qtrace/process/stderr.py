"""What C libraries print by themselves, caught on its way to stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

__all__ = ["caught_lines"]

_STDERR = 2
_alone = threading.Lock()  # the file descriptor belongs to the whole process


@contextlib.contextmanager
def caught_lines(starts: tuple[str, ...]) -> Iterator[list[str]]:
    """Keeps lines that begin with one of ``starts`` from file descriptor 2.

    Yields:
        A list that has these lines at the end; all others go on to stderr. It stays empty where there is no
        stderr.

    Raises:
        OSError: when there is no file handle to spare.
    """
    lines: list[str] = []
    with _alone, contextlib.ExitStack() as stack:
        if _is_open():
            caught = stack.enter_context(tempfile.TemporaryFile())
            stack.callback(_give_back, os.dup(_STDERR), caught, starts, lines)
            _flush()
            os.dup2(caught.fileno(), _STDERR)
        yield lines


def _is_open() -> bool:
    try:
        os.fstat(_STDERR)
    except OSError:
        return False
    return True


def _give_back(real: int, caught: IO[bytes], starts: tuple[str, ...], lines: list[str]) -> None:
    _flush()
    os.dup2(real, _STDERR)
    os.close(real)
    caught.seek(0)
    for line in caught.read().decode("utf-8", "surrogateescape").splitlines(keepends=True):
        if line.startswith(starts):
            lines.append(line.rstrip())
        else:
            with contextlib.suppress(OSError):  # a full disk
                os.write(_STDERR, line.encode("utf-8", "surrogateescape"))


def _flush() -> None:
    """Python's own text goes where it was meant to go."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
