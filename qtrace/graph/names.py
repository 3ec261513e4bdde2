"""Names that nothing has yet."""

from __future__ import annotations

import itertools
from collections.abc import Callable

__all__ = ["unused_name"]


def unused_name(name: str, is_used: Callable[[str], bool]) -> str:
    """Returns ``name``, with the first number from 1 that makes it unused if it is used.

    Args:
        name: the preferred name.
        is_used: whether something has a name already; ``names.__contains__`` for a set of names.
    """
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return next(each for each in itertools.chain([name], numbered) if not is_used(each))
