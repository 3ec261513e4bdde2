"""Runs a file in its runtime beside the graph: on a thread, and a batch ahead.

MegEngine computes the graph on one thread. A session of onnxruntime keeps no lock of Python while it runs, so
both together take the time of the longer one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import numpy as np

from qtrace.verification.runtimes.base import RuntimeRun, Session

__all__ = ["Ahead", "look_ahead"]

_Item = TypeVar("_Item")
_Begun = TypeVar("_Begun")

# The values of the inputs of a batch that runs ahead: two batches of more would take much memory.
_MOST_VALUES = 1 << 22


class Ahead:
    """Runs batches in sessions before their values are asked for, within a ``with`` block.

    Args:
        sessions: the sessions. Those with an attribute ``concurrent`` that is true run small batches on
            threads. The others, which may compute by MegEngine, run when their values are asked for.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = sessions
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Ahead:
        count = sum(map(_is_concurrent, self._sessions))
        if count:
            self._pool = ThreadPoolExecutor(max(1, min(count, (os.cpu_count() or 1) - 1)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def begin(self, inputs: list[np.ndarray]) -> list[Callable[[], RuntimeRun]]:
        """Begins to run a batch; returns what gives the run of each session, or raises its error."""
        runs: list[Callable[[], RuntimeRun]] = []
        small = sum(x.size for x in inputs) <= _MOST_VALUES
        for session in self._sessions:
            if self._pool is not None and small and _is_concurrent(session):
                runs.append(self._pool.submit(session.run, inputs).result)
            else:
                runs.append(functools.partial(session.run, inputs))
        return runs


def _is_concurrent(session: Session) -> bool:
    return bool(getattr(session, "concurrent", False))


def look_ahead(items: Iterable[_Item], begin: Callable[[_Item], _Begun]) -> Iterator[_Begun]:
    """Yields what ``begin`` gives for each item, once it has begun the next one, too.

    An error of an item comes in its turn, when those before it are done.

    Args:
        items: the items, each of which is read when the one before it was begun.
        begin: begins with an item.
    """
    iterator = iter(items)
    coming = _next_begun(iterator, begin)
    while coming is not None:
        if isinstance(coming, _Failed):
            raise coming.error
        current, coming = coming, _next_begun(iterator, begin)
        yield current[0]


class _Failed:
    """An item that could not be read or begun."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _next_begun(
    iterator: Iterator[_Item], begin: Callable[[_Item], _Begun]
) -> tuple[_Begun] | _Failed | None:
    try:
        return (begin(next(iterator)),)
    except StopIteration:
        return None
    except Exception as error:
        return _Failed(error)
