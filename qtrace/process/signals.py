"""Protects cleanup code from the signals that end a process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

__all__ = ["undisturbed"]

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
