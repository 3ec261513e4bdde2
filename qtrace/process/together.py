"""Work that is independent of each other, on several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

__all__ = ["Together"]

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class Together:
    """Threads that compute beside the calling one, within a ``with`` block.

    What they run is numpy and scipy, which release Python's lock, and never MegEngine. A call computes on one
    thread, whatever their number is, so that the results are the same for any.

    Args:
        threads: number of threads, the calling one included; None for all cores.

    Attributes:
        threads: number of threads.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or os.cpu_count() or 1
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Together:
        if self.threads > 1:
            self._pool = ThreadPoolExecutor(self.threads - 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def run(self, calls: Iterable[Callable[[], _Result]]) -> list[_Result]:
        """Returns the results of some calls, in their order; a call may itself run others.

        Raises:
            Exception: that of the first call that fails.
        """
        first, *others = calls
        if self._pool is None:
            return [first(), *(call() for call in others)]
        waiting: list[Future[_Result]] = [self._pool.submit(call) for call in others]
        try:
            own = {0: first()}
            for number, (call, future) in enumerate(zip(others, waiting, strict=True), 1):
                # This thread takes what no other one has begun, so that nested calls never wait forever.
                if future.cancel():
                    own[number] = call()
            return [own[i] if i in own else waiting[i - 1].result() for i in range(len(waiting) + 1)]
        finally:
            for future in waiting:
                future.cancel()

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """Returns what a function gives for each item."""
        calls = [_bound(function, item) for item in items]
        return self.run(calls) if calls else []


def _bound(function: Callable[[_Item], _Result], item: _Item) -> Callable[[], _Result]:
    return lambda: function(item)
