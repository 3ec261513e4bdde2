"""Memory: what the C library keeps after it was freed, and Python's garbage collector."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from qtrace.process.engine import synchronize

__all__ = [
    "LargeFrees",
    "older_objects_spared",
    "paused_collector",
    "return_free_memory",
    "returns_memory",
    "when_returning",
]


@contextlib.contextmanager
def paused_collector(collect_first: bool = False) -> Iterator[None]:
    """Pauses collection within the block: it would walk a hundred thousand new objects again and again.

    Args:
        collect_first: whether to free graphs that were dropped before, which only the collector can.
    """
    enabled = gc.isenabled()
    if enabled and collect_first:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def older_objects_spared() -> Iterator[None]:
    """Collects within the block only what it makes; what was there before is looked at afterwards.

    The modules of MegEngine, onnx and qtrace have some 140,000 objects, which take a tenth of a second each
    time. Graphs that were dropped before are freed first: a block that is entered again and again would spare
    them for good. It does nothing where objects are spared already, by the caller or by a block around this
    one.
    """
    if gc.get_freeze_count():
        yield
        return
    if gc.isenabled():
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
