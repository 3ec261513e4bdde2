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
        news(("begun", task))
        match task:
            case "fail":
                raise DataError("it is bad")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "print":
                print("a print of the user's")
            case ("wait", path):
                try:
                    time.sleep(300)
                finally:
                    Path(path).write_text("saved")
        return task

    def describe_end(self, number: int, ending: str, news: int) -> str:
        return f"task {number} {ending} after {news} news."

    def describe_failure(self, number: int, line: str) -> str:
        return f"task {number}: {line}"
