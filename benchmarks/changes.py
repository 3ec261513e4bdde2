"""The instants at which a process changes its files: recorded, and hit by a signal before one of them.

Python audits each call that opens, renames or removes a file, before it is made. So the n-th change of a
command is one instant, however fast the machine is and whatever else it does.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

__all__ = ["read_changes", "record_changes", "signal_before", "turning_points"]

_RECORD = "changes.txt"
_CALLS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_EXCHANGE = "renameat2"  # which `files.replace_folder` looks up right before it calls it
_NEW_NAMES = ("os.rename ", _EXCHANGE)
_TOKEN = re.compile(r"\.[0-9a-f]{8}\.tmp")


def record_changes() -> None:
    """Writes down every change that this process makes from here on, for `read_changes`."""
    handle = os.open(_RECORD, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    _watch(lambda change: os.write(handle, f"{change}\n".encode()))


def read_changes() -> tuple[str, ...]:
    """Returns the changes of the process that was recorded last in the current folder."""
    return tuple(Path(_RECORD).read_text(encoding="utf-8").splitlines())


def turning_points(changes: Sequence[str]) -> list[int]:
    """Returns where each name is given first and last, and where the next change follows."""
    named = {change: number for number, change in reversed([*enumerate(changes)]) if _names(change)}
    named_last = {change: number for number, change in enumerate(changes) if _names(change)}
    numbers = {*named.values(), *named_last.values()}
    return sorted({n for number in numbers for n in (number, number + 1) if n < len(changes)})


def signal_before(numbers: Collection[int], signal_number: int) -> Callable[[], None]:
    """Returns what lets a process send itself a signal before the changes of these numbers, from 0."""

    def begin() -> None:
        counter = itertools.count()

        def act(_: str) -> None:
            if next(counter) in numbers:
                os.kill(os.getpid(), signal_number)

        _watch(act)

    return begin


def _names(change: str) -> bool:
    """Whether something gets another name by a change."""
    return change.startswith(_NEW_NAMES)


def _watch(act: Callable[[str], object]) -> None:
    """Calls ``act`` before each change in the current folder, until the process ends."""
    folder = f"{os.getcwd()}{os.sep}"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if change := _describe(event, arguments, folder):
            act(change)

    sys.addaudithook(hook)


def _describe(event: str, arguments: tuple[Any, ...], folder: str) -> str:
    """Says what an audited call is about to change in ``folder``; "" for nothing."""
    if event == "ctypes.dlsym":
        return _EXCHANGE if arguments[1] == _EXCHANGE else ""
    if event == "open":
        if isinstance(arguments[0], int) or not (arguments[2] or 0) & _WRITES:
            return ""
    elif event not in _CALLS:
        return ""
    if isinstance(arguments[0], int):
        return f"{event} of an open file"
    path = os.fsdecode(arguments[0])
    if path.startswith(os.sep) and not path.startswith(folder):
        return ""
    return f"{event} {_TOKEN.sub('.tmp', path.removeprefix(folder))}"
