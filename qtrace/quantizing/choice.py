"""The rows among which a file is chosen: all on integers, a balance of time and noise, and float."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qtrace.display import format_bytes

__all__ = ["Row", "format_rows"]


@dataclass(frozen=True)
class Row:
    """What one choice of ops on integers has, beside the others.

    Attributes:
        name: fastest, balanced or float.
        speed: how many times as fast as float; None if it is not known.
        sqnr_db: the SQNR of the worst column group on held-back samples, in dB; infinity for float.
        bytes: the size of the file.
        option: the option that takes this row, such as ``prefer="speed"``; "" for the row that is taken.
        chosen: whether the file is this row.
    """

    name: str
    speed: float | None
    sqnr_db: float
    bytes: int
    option: str = ""
    chosen: bool = False

    def cells(self) -> tuple[str, str, str, str, str]:
        """Returns name, speed, SQNR, size and option as texts."""
        speed = "-" if self.speed is None else f"{self.speed:.2f}x"
        sqnr = f"{self.sqnr_db:.1f}" if math.isfinite(self.sqnr_db) else "-"
        return self.name, speed, sqnr, format_bytes(self.bytes), self.option


def format_rows(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each row below a line of headers, the chosen one marked; none without rows."""
    header = "choice        speed   SQNR   size"
    lines = []
    for row in rows:
        name, speed, sqnr, size, option = row.cells()
        line = f"{'*' if row.chosen else ' '} {name:<10}{speed:>7}{sqnr:>7}   {size:<9} {option}"
        lines.append(line.rstrip())
    return [header, *lines] if lines else []
