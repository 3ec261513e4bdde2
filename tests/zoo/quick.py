"""The networks of the zoo that the quick tests run, and one of each that show the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from tests.zoo.catalog import CNN

__all__ = ["one_of_each", "parameters"]


def parameters(entries: Sequence[Any], quick: Collection[str] | None = None) -> list[Any]:
    """The entries as parameters of a fixture or a test, with their names and marks.

    A convolutional network of which another of its family shows almost the same is ``long``.

    Args:
        entries: the networks.
        quick: names of those that are not slow here; None for all but those that say they are.
    """
    shown = {entry.name for entry in one_of_each(entries)}

    def marks(entry: Any) -> list[Any]:
        if not (entry.slow if quick is None else entry.name not in quick):
            return []
        return [pytest.mark.slow if entry.name in shown or entry not in CNN else pytest.mark.long]

    return [pytest.param(entry, id=entry.name, marks=marks(entry)) for entry in entries]


def one_of_each(entries: Sequence[Any]) -> list[Any]:
    """Returns the entries without the slow ones of which another entry of their family shows almost the same.

    Args:
        entries: the networks.
    """
    shown = {entry.family for entry in entries if not entry.slow}
    return [entry for entry in entries if not entry.slow or entry.family not in shown]
