"""Where MegEngine computes: on one thread of one process, the one that loaded it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import megengine as mge

from qtrace.errors import QtraceError

__all__ = ["on_engine_thread"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def on_engine_thread(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a public function that needs MegEngine: it refuses threads and processes without it.

    MegEngine's own words there are those of a failed assertion, which reads as if a good model or file were
    damaged.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            mge.Tensor(0.0)
        except RuntimeError as error:
            _refuse(function.__name__, str(error), error)
        return function(*args, **kwargs)

    return call


def _refuse(name: str, words: str, error: RuntimeError) -> None:
    """Raises for the two errors that a thread or a process without MegEngine gives; others surface later."""
    if "assert_available" in words:
        raise QtraceError(
            f"{name} was called in a forked process, where MegEngine cannot compute: start processes anew, "
            "such as by multiprocessing.get_context('spawn')."
        ) from error
    if "context.transformations" in words:
        raise QtraceError(
            f"{name} was called on a thread on which MegEngine cannot compute: call it on the main thread, "
            "or in a process of its own."
        ) from error
