"""Runs a file in its runtime beside the graph: on a thread, and a batch ahead.

MegEngine computes the graph on one thread. A session of onnxruntime keeps no lock of Python while it runs, so
both together take the time of the longer one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from qtrace.process.together import Together, count_threads
from qtrace.verification.runtimes.base import RuntimeRun, Session

__all__ = ["Ahead", "threads_for"]

# The values of the inputs of a batch that runs ahead: two batches of more would take much memory.
_MOST_VALUES = 1 << 22


class Ahead:
    """Runs batches in sessions before their values are asked for.

    Args:
        sessions: the sessions. Those with an attribute ``concurrent`` that is true run small batches on
            threads. The others, which may compute by MegEngine, run when their values are asked for.
        together: the threads; see `threads_for`.
    """

    def __init__(self, sessions: Sequence[Session], together: Together) -> None:
        self._sessions, self._together = sessions, together

    def begin(self, inputs: list[np.ndarray]) -> list[Callable[[], RuntimeRun]]:
        """Begins to run a batch; returns what gives the run of each session, or raises its error."""
        small = sum(x.size for x in inputs) <= _MOST_VALUES
        runs = [functools.partial(session.run, inputs) for session in self._sessions]
        return [
            self._together.begin(run) if small and _is_concurrent(session) else run
            for session, run in zip(self._sessions, runs, strict=True)
        ]


def threads_for(sessions: Sequence[Session]) -> int:
    """Returns the number of threads on which sessions run beside the graph, that of the graph included."""
    count = sum(map(_is_concurrent, sessions))
    return 1 + min(count, max(1, count_threads(None) - 1))


def _is_concurrent(session: Session) -> bool:
    return bool(getattr(session, "concurrent", False))
