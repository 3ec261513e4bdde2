"""Memory that the C library keeps after it was freed, which large networks cannot afford."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from qtrace.process.engine import synchronize

__all__ = ["LargeFrees", "return_free_memory", "returns_memory", "when_returning"]

_MB = 2**20
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
# What gives back the memory that other libraries keep.
_others: list[Callable[[], None]] = []


def return_free_memory() -> None:
    """Gives freed memory back to the system, where the C library can (glibc).

    It keeps what was freed in pieces of up to 32 MB for later, in every thread: for a network with weights of
    this size that adds up to several times the network. MegEngine computes and frees later than it is told,
    so this waits for it: without, what it rounds of all weights is in memory at once.
    """
    synchronize()
    for give_back in _others:
        give_back()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def when_returning(give_back: Callable[[], None]) -> None:
    """Adds a function that `return_free_memory` calls, for memory that another library keeps."""
    _others.append(give_back)


def returns_memory(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorates a stage after which the memory that it has freed goes back to the system."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        result = function(*args, **kwargs)
        return_free_memory()
        return result

    return call


class LargeFrees:
    """Gives freed memory back each time that much was freed.

    Args:
        least: the number of bytes after which it is worth the time, milliseconds.
    """

    def __init__(self, least: int = 128 * _MB) -> None:
        self._least, self._freed = least, 0

    def note(self, count: int) -> None:
        """Notes that ``count`` bytes were freed."""
        self._freed += count
        if self._freed >= self._least:
            self.give_back()

    def give_back(self) -> None:
        """Gives back what was freed since the last time, if it is worth a call."""
        if self._freed >= min(self._least, 16 * _MB):
            return_free_memory()
        self._freed = 0
