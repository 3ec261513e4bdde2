"""The networks of the zoo that the quick tests run, and one of each that show the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

__all__ = ["one_of_each", "parameters"]


def parameters(entries: Sequence[Any], quick: Collection[str] | None = None) -> list[Any]:
    """The entries as parameters of a fixture or a test, with their names and marks.

    Args:
        entries: the networks.
        quick: names of those that are not slow here; None for all but those that say they are.
    """
    slow = [e.slow if quick is None else e.name not in quick for e in entries]
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(e, id=e.name, marks=marks[s]) for e, s in zip(entries, slow, strict=True)]


def one_of_each(entries: Sequence[Any]) -> list[Any]:
    """Returns the entries without the slow ones of which another entry of their family shows almost the same.

    Args:
        entries: the networks.
    """
    shown = {entry.family for entry in entries if not entry.slow}
    return [entry for entry in entries if not entry.slow or entry.family not in shown]
