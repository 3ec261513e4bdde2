"""Refuses threads and processes on which MegEngine cannot compute: only the thread that loaded it can."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import megengine as mge

from qtrace.errors import QtraceError
from qtrace.process.engine import quiet

__all__ = ["on_engine_thread"]

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
