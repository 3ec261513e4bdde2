"""Where the stages of a run report to: the console of a command, or the library's log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

__all__ = ["LogReporter", "Reporter"]

_LOG = logging.getLogger("qtrace")


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
    """Writes notes (INFO) and warnings to the logger ``qtrace``.

    Attributes:
        progress: whether to show progress bars on stderr.
    """

    progress: bool = True

    def note(self, text: str) -> None:
        """Logs a note."""
        _LOG.info("%s", text)

    def warn(self, text: str) -> None:
        """Logs a warning."""
        _LOG.warning("%s", text)
