"""The time of a run: its estimate, when evaluations are due, and the limit that `max_minutes` sets."""

from __future__ import annotations

import math
import time

from qtrace.extras.finetune.data import Samples
from qtrace.extras.finetune.settings import FinetuneSettings

__all__ = ["Pace", "RunSchedule"]

_MAX_EVALUATIONS = 20
_MIN_EVALUATION_INTERVAL = 5  # steps


class Pace:
    """The clock of a run, which starts when the object is made.

    Args:
        max_minutes: the most minutes that the run may take; None for no limit.

    Attributes:
        step_seconds: how long the latest step took; 0 before the first.
        evaluation_seconds: how long the latest evaluation took; 0 before the first.
    """

    def __init__(self, max_minutes: float | None) -> None:
        self.max_minutes = max_minutes
        self.step_seconds = self.evaluation_seconds = 0.0
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since the run began."""
        return time.monotonic() - self._start

    def has(self, seconds: float) -> bool:
        """Returns whether work of ``seconds`` fits into the rest of the time."""
        return self.max_minutes is None or self.seconds + seconds <= 60 * self.max_minutes

    def has_step(self, evaluations: int) -> bool:
        """Returns whether a step, ``evaluations`` and the evaluation for the report fit into the time."""
        return self.has(self.step_seconds + (evaluations + 1) * self.evaluation_seconds)


class RunSchedule:
    """When a run evaluates, and how many steps fit into its time.

    Args:
        settings: the size of a batch, and the steps between evaluations.
        unseen: the samples to evaluate on.
        pace: the clock of the run.
    """

    def __init__(self, settings: FinetuneSettings, unseen: Samples, pace: Pace) -> None:
        self.pace, self._evaluate_every = pace, settings.evaluate_every
        self._batches = math.ceil(unseen.count / (settings.batch_size if unseen.joined else 1))

    def interval(self, total: int) -> int:
        """The steps between two evaluations in a run of ``total``, so that these take little of its time."""
        if self._evaluate_every is not None:
            return self._evaluate_every
        return max(math.ceil(total / _MAX_EVALUATIONS), self._batches, _MIN_EVALUATION_INTERVAL)

    def evaluations(self, steps: int, total: int | None) -> int:
        """How often ``steps`` of ``total`` (None: there are no others) are evaluated, report included."""
        return math.ceil(steps / self.interval(total or steps)) + 1

    def has_time(self, steps: int, total: int | None) -> bool:
        """Whether ``steps`` and their evaluations fit into the time, as far as both were timed."""
        evaluations = self.evaluations(steps, total)
        return self.pace.has(steps * self.pace.step_seconds + evaluations * self.pace.evaluation_seconds)

    def fit(self, steps: int, total: int | None) -> int:
        """Returns how many of ``steps`` fit into the time; at least one."""
        return next((n for n in range(steps, 1, -1) if self.has_time(n, total)), 1)

    def describe(self, steps: int, total: int | None) -> str:
        """Estimates the time of ``steps`` in a clause."""
        pace, evaluations = self.pace, self.evaluations(steps, total)
        seconds = steps * pace.step_seconds + evaluations * pace.evaluation_seconds
        return (
            f"about {_format_seconds(seconds)}: {steps} steps of {pace.step_seconds:.2g} s and {evaluations} "
            f"evaluations of {pace.evaluation_seconds:.2g} s"
        )


def _format_seconds(seconds: float) -> str:
    """Formats a duration in seconds, minutes or hours."""
    if seconds < 100:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"
