"""Threads: BLAS's own, the one that MegEngine computes on, and several that work at once or ahead."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import ParamSpec, TypeVar

import megengine as mge
from threadpoolctl import threadpool_limits

from qtrace.errors import QtraceError
from qtrace.process.engine import quiet

__all__ = ["Together", "count_threads", "on_engine_thread", "one_blas_thread", "prefetch", "prefetch_map"]


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Computes products of matrices on one thread within the block, whatever the environment says.

    More threads add up the parts of a sum in another order. What is decided by small margins then differs.
    """
    with threadpool_limits(limits=1, user_api="blas"):
        yield


_P = ParamSpec("_P")
_R = TypeVar("_R")


def on_engine_thread(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a public function raise a clear error on threads and processes where MegEngine cannot compute.

    Its first call starts MegEngine's threads, and lets them sleep while they are idle.
    MegEngine itself fails with an assertion there, which reads as if a good model or file were damaged.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            quiet()
            mge.Tensor(0.0)
        except RuntimeError as error:
            _translate(function.__name__, str(error), error)
        return function(*args, **kwargs)

    return call


def _translate(name: str, message: str, error: RuntimeError) -> None:
    """Raises a clear error for the two that MegEngine gives there; other errors surface later."""
    if "assert_available" in message:
        raise QtraceError(
            f"{name} was called in a forked process, where MegEngine cannot compute: start processes anew, "
            "such as by multiprocessing.get_context('spawn')."
        ) from error
    if "context.transformations" in message:
        raise QtraceError(
            f"{name} was called on a thread on which MegEngine cannot compute: call it on the main thread, "
            "or in a process of its own."
        ) from error


_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
_Handle = TypeVar("_Handle")


def count_threads(threads: int | None) -> int:
    """Returns ``threads``, or the number of cores where it is None."""
    return threads or os.cpu_count() or 1


class Together:
    """Threads that compute together with the calling one, within a ``with`` block.

    What they run is numpy, scipy and sessions, which release Python's lock, and never MegEngine. A call
    computes on one thread, whatever their number is, so that the results are the same for any.

    Args:
        threads: number of threads, the calling one included; None for all cores.

    Attributes:
        threads: number of threads.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = count_threads(threads)
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

    def begin(self, call: Callable[[], _Result]) -> Callable[[], _Result]:
        """Begins a call on another thread; returns what gives its result, or raises its error.

        Without another thread, the call runs when its result is asked for.
        """
        return call if self._pool is None else self._pool.submit(call).result

    def run(self, calls: Iterable[Callable[[], _Result]]) -> list[_Result]:
        """Returns the results of some calls, in their order; a call may itself run others.

        Raises:
            Exception: the first call's that fails.
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
        calls = [functools.partial(function, item) for item in items]
        return self.run(calls) if calls else []


def prefetch(items: Iterable[_Item], begin: Callable[[_Item], _Handle], count: int = 1) -> Iterator[_Handle]:
    """Yields what ``begin`` gives for each item, once it has begun the next ones, too.

    An error of an item comes in its turn, when those before it are done.

    Args:
        items: the items, each of which is read when the one before it was begun.
        begin: begins with an item.
        count: number of items that have begun next to the one that is taken.
    """
    waiting: deque[_Handle] = deque()
    failure: Exception | None = None
    try:
        for item in items:
            waiting.append(begin(item))
            if len(waiting) > count:
                yield waiting.popleft()
    except Exception as error:
        failure = error
    while waiting:
        yield waiting.popleft()
    if failure is not None:
        raise failure


def prefetch_map(
    function: Callable[[_Item], _Result], items: Iterable[_Item], threads: int | None
) -> Iterator[_Result]:
    """Yields the results of a function in order, while threads compute the results of the next items.

    Args:
        function: a function that releases Python's lock, as a session does.
        items: its arguments.
        threads: number of threads; None for all cores. With one, each result is computed when it is taken.
    """
    count = count_threads(threads)
    beside = count if count > 1 else 0
    with Together(1 + beside) as together:
        begun = prefetch(items, lambda item: together.begin(functools.partial(function, item)), beside)
        yield from map(_finish, begun)


def _finish(begun: Callable[[], _Result]) -> _Result:
    return begun()
