"""How long a run takes: an estimate before the first step, and a bound on the time."""

from __future__ import annotations

import time

__all__ = ["Pace", "minutes"]


class Pace:
    """The time of a run, from its making on.

    Args:
        bound: the most minutes that the run may take; None for no bound.
    """

    def __init__(self, bound: float | None) -> None:
        self.bound = bound
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since the run began."""
        return time.monotonic() - self._begun

    @property
    def over(self) -> bool:
        """Whether the time is used up."""
        return self.bound is not None and self.seconds >= 60 * self.bound

    def fitting(self, steps: int, seconds: float) -> int:
        """Returns how many of ``steps`` fit into what is left of the bound, 1 at least.

        Args:
            steps: steps still to take.
            seconds: how long they would take, evaluations included.
        """
        left = float("inf") if self.bound is None else 60 * self.bound - self.seconds
        return steps if seconds <= left else max(int(steps * max(left, 0.0) / seconds), 1)


def minutes(seconds: float) -> str:
    """Returns a time in the unit that suits it."""
    if seconds < 100:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"
