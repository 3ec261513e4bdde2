"""Signals that end a process, which may not cut short what must be tidied up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

__all__ = ["undisturbed"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Lets no second Ctrl-C, SIGTERM or SIGHUP cut short what must be tidied up."""
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
