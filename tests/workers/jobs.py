"""Jobs for the tests of workers: processes import them from here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qtrace.errors import DataError

__all__ = ["Echo"]


class Echo:
    """Gives a task back after ``news``; some tasks fail, die, print or wait for the end.

    Args:
        closed: whether no worker can be prepared.
    """

    def __init__(self, closed: bool = False) -> None:
        self.closed = closed

    def open(self) -> Callable[[Any, Callable[[Any], None]], Any]:
        if self.closed:
            raise DataError("the shop is closed")
        return self._do

    def _do(self, task: Any, news: Callable[[Any], None]) -> Any:
        if isinstance(task, tuple):
            return self._wait(task, news)
        news(("begun", task))
        match task:
            case "fail":
                raise DataError("it is bad")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "print":
                print("a print of the user's")
        return task

    def _wait(self, task: tuple[str, str], news: Callable[[Any], None]) -> Any:
        """Waits for the end, and saves then; whoever reads the news knows that it will."""
        try:
            news(("begun", task))
            time.sleep(3000)
        finally:
            Path(task[1]).write_text("saved")

    def describe_end(self, number: int, ending: str, news: int) -> str:
        return f"task {number} {ending} after {news} news."

    def describe_failure(self, number: int, line: str) -> str:
        return f"task {number}: {line}"
