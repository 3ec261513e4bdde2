"""How busy other programs keep the machine while something is timed here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BUSY_SHARE", "OtherWork", "watched_load"]

BUSY_SHARE = 0.25
"""The share of the processor from which on other programs change what is timed."""
_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # the columns of /proc/stat for idle and for waiting (proc_stat(5))
_GUESTS = 8  # the first column of times that count in others, too


@dataclass
class OtherWork:
    """What other programs took of the processor in a time.

    Attributes:
        share: their part of all cores, 0 to 1; 0 where that is unknown.
    """

    share: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether other programs may have changed the ratio of two times."""
        return self.share >= BUSY_SHARE


@contextmanager
def watched_load() -> Iterator[OtherWork]:
    """Measures what others take while a block runs; the result is there after the block.

    Programs that this process has started and that still run count as others.
    """
    work, start = OtherWork(), time.perf_counter()
    before, own = _busy_seconds(), time.process_time()
    yield work
    after, wall = _busy_seconds(), time.perf_counter() - start
    if before is not None and after is not None and wall > 0:
        others = after - before - (time.process_time() - own)
        work.share = min(max(others / (wall * (os.cpu_count() or 1)), 0.0), 1.0)


def _busy_seconds() -> float | None:
    """Returns the seconds that all cores have worked since the machine started; None if it does not say."""
    try:
        columns = _STAT.read_text(encoding="utf-8").splitlines()[0].split()[1:]
        ticks = [int(column) for column in columns[:_GUESTS]]
    except (OSError, IndexError, ValueError):
        return None
    worked = sum(t for column, t in enumerate(ticks) if column not in _IDLE)
    return worked / os.sysconf("SC_CLK_TCK")
