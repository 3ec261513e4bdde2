"""The output folder of a search: its lock, what the search is about, and its files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qtrace.errors import QtraceError
from qtrace.storage.files import parse_document, replacing
from qtrace.storage.outputs import locked

__all__ = ["BEST", "FILES", "PAGE", "SEARCH", "SUMMARY", "TRIALS", "search_folder", "write_text"]

TRIALS, BEST, SUMMARY, PAGE, SEARCH = "trials.jsonl", "best.yaml", "tune.json", "tune.html", "search.json"
FILES = (TRIALS, BEST, SUMMARY, PAGE, SEARCH)
_LOCK = ".lock"


def write_text(path: Path, text: str) -> None:
    """Writes a file that appears whole or not at all.

    Raises:
        QtraceError: when it cannot be written.
    """
    try:
        with replacing(path) as (stream,):
            stream.write(text.encode("utf-8"))
    except OSError as error:
        raise QtraceError(f"{path} cannot be written: {error.strerror}.") from error


@contextmanager
def search_folder(
    folder: Path, about: dict[str, Any], *, force: bool, note: Callable[[str], None]
) -> Iterator[Path]:
    """Holds the lock on an output folder, which is made or belongs to the same search.

    Args:
        folder: the folder.
        about: all that trials depend on: model, data, recipe, seed ...; as JSON has it.
        force: whether to drop the trials of an earlier search.
        note: called with messages on stale locks.

    Raises:
        QtraceError: when the folder holds other files, or trials of another search, or is in use.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QtraceError(f"{folder} cannot be a folder: {error.strerror}.") from error
    with locked(folder / _LOCK, str(folder), note):
        others = sorted(e.name for e in folder.iterdir() if e.name not in FILES and e.name != _LOCK)
        others = [name for name in others if not name.endswith(".tmp")]  # of a killed run
        if others and not (folder / SEARCH).exists():
            raise QtraceError(
                f"{folder} holds files that are not of a search ({others[0]}): name another folder."
            )
        if force:
            for name in FILES:
                (folder / name).unlink(missing_ok=True)
        _compare(folder, about)
        yield folder


def _compare(folder: Path, about: dict[str, Any]) -> None:
    """Writes down what the search is about, or refuses a folder of another search."""
    path = folder / SEARCH
    if not path.exists():
        write_text(path, json.dumps(about, indent=2) + "\n")
        return
    try:
        before = parse_document(path.read_bytes())
    except (OSError, ValueError) as error:
        raise QtraceError(f"{path} cannot be read: begin anew with --force.") from error
    keys = [key for key in about if before.get(key) != about[key]]
    if keys:
        raise QtraceError(
            f"{folder} holds the trials of a search with another {keys[0]}: name another folder, or begin "
            "anew with --force."
        )
