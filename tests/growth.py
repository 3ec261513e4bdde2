"""How the work of a call grows, counted in calls of functions, which a busy machine does not change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["assert_linear", "calls_of"]

_STARTS = ("call", "c_call")


def calls_of(work: Callable[[], object]) -> int:
    """Counts the functions, of Python and of C, that ``work`` calls in this thread."""
    count = 0

    def profile(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in _STARTS

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def assert_linear(counts: dict[int, int], *, slack: float = 1.3) -> None:
    """Fails if the calls grow faster than the size of the graph.

    Args:
        counts: The calls counted at two sizes; the smaller size comes first.
        slack: How much faster than the size the calls may grow.
    """
    (small, few), (large, many) = counts.items()
    assert 0 < small < large, counts
    assert many / few < slack * large / small, counts
