"""The time of a run: an estimate before the first step, and the limit that `max_minutes` sets."""

from __future__ import annotations

import time

__all__ = ["Pace", "format_seconds"]


class Pace:
    """The clock of a run, which starts when the object is made.

    Args:
        max_minutes: the most minutes that the run may take; None for no limit.
    """

    def __init__(self, max_minutes: float | None) -> None:
        self.max_minutes = max_minutes
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since the run began."""
        return time.monotonic() - self._start

    def has(self, seconds: float) -> bool:
        """Returns whether work of ``seconds`` fits into the rest of the time."""
        return self.max_minutes is None or self.seconds + seconds <= 60 * self.max_minutes


def format_seconds(seconds: float) -> str:
    """Formats a duration in seconds, minutes or hours."""
    if seconds < 100:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"
