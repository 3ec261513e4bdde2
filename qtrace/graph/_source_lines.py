"""The line of the user's code at which each expr of a trace was recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from megengine.traced_module.expr import Expr
from megengine.traced_module.traced_module import InternalGraph

from qtrace.graph._failures import LIBRARIES

__all__ = ["record_lines"]


@contextmanager
def record_lines() -> Iterator[dict[int, str]]:
    """Notes where the exprs that are traced in this block come from.

    Yields:
        ``id`` of an expr -> ``file.py:12``, the innermost line that is no library's; without an entry where
        there is none. Filled while the block runs.
    """
    lines: dict[int, str] = {}
    original = InternalGraph._insert

    def insert(self: InternalGraph, expr: Expr) -> Any:
        line = _user_line(sys._getframe(1))
        if line:
            lines[id(expr)] = line
        return original(self, expr)

    InternalGraph._insert = insert
    try:
        yield lines
    finally:
        InternalGraph._insert = original


def _user_line(frame: FrameType | None) -> str:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
