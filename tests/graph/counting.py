"""Counts the work of a function, for tests of how it grows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["count_calls"]


def count_calls(action: Callable[[], Any]) -> int:
    """Runs ``action`` and returns the number of Python calls that it made."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count
