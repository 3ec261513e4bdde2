"""Where the stages of a run report to, and the time of each stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

__all__ = ["NOTES", "LogReporter", "Reporter", "StageTimes"]

NOTES = "qtrace.notes"
"""The logger of what a run tells its user; commands show it."""
_LOG = logging.getLogger("qtrace")
_NOTES = logging.getLogger(NOTES)


class Reporter(Protocol):
    """What takes the notes and warnings of a run."""

    @property
    def progress(self) -> bool:
        """Whether to show progress bars."""

    def note(self, text: str) -> None:
        """Takes a note."""

    def warn(self, text: str) -> None:
        """Takes a warning."""


@dataclass(frozen=True)
class LogReporter:
    """Writes notes (INFO) and warnings to the logger ``qtrace.notes``.

    Attributes:
        progress: whether to show progress bars on stderr.
    """

    progress: bool = True

    def note(self, text: str) -> None:
        """Logs a note."""
        _NOTES.info("%s", text)

    def warn(self, text: str) -> None:
        """Logs a warning."""
        _NOTES.warning("%s", text)


class StageTimes:
    """Measures the stages of a run; a stage that runs again adds to its time."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> Mapping[str, float]:
        """Name of a stage -> its time in seconds, in the order in which the stages began."""
        return dict(self._seconds)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Measures the block, and writes its time and its processor time to the log (INFO).

        Args:
            stage: the name of the stage.
        """
        start, processor = time.perf_counter(), time.process_time()
        self._seconds.setdefault(stage, 0.0)
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[stage] += seconds
            busy = time.process_time() - processor
            _LOG.info("%s took %.1f s, %.1f s of processor time", stage, seconds, busy)
