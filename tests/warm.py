"""Processes of runtimes that serve one test after the other: most of a verification is the start of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.runtimes import child
from qtrace.runtimes.child import Child
from qtrace.runtimes.host import RuntimeHost

__all__ = ["COLD", "start"]

# Folders and files whose tests are about these processes: each of theirs is a new one.
COLD = ("tests/benchmarking/", "tests/runtimes/", "tests/verification/runtimes/test_children.py")

_start = child._start
_idle: dict[str, list[tuple[Child, bytes]]] = defaultdict(list)


def start(host: RuntimeHost | None, subject: str) -> Any:
    """Returns a process that an earlier test has left, or a new one; one elsewhere is always new."""
    title, _, _ = subject.partition(" with ")
    return _start(host, subject) if host is not None else _Lent(title, subject)


class _Lent:
    """A child process until it is closed, with the files that were opened meanwhile."""

    def __init__(self, title: str, subject: str) -> None:
        self._title, self._opened = title, list[int]()
        self._child, self._greeting = _idle[title].pop() if _idle[title] else (_start(None, subject), b"")
        self._child.subject = self.subject = subject
        self.seconds = self._child.seconds

    def read_line(self, deadline: float) -> bytes:
        """Returns what the process said as it started."""
        self._greeting = self._greeting or self._child.read_line(deadline)
        return self._greeting

    def ask(self, request: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> tuple[Any, list[np.ndarray]]:
        """Sends a request; see `Child.ask`."""
        if self._child is None:
            raise ExportError(f"{self.subject} has ended already: see the error of the call before.")
        answer = self._child.ask(request, arrays)
        if request["command"] == "open":
            self._opened.append(answer[0]["number"])
        return answer

    def close(self) -> None:
        """Frees the files and keeps the process for the next test, if it lives."""
        child, self._child = getattr(self, "_child", None), None
        if child is None or child._process is None:
            return
        for number in self._opened:
            child.ask({"command": "close", "number": number})
        _idle[self._title].append((child, self._greeting))

    __del__ = close
