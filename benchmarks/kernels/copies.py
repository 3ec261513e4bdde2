"""Times ops in a runtime without a profile: more copies of an op in a network take longer.

All copies read the same tensors and write outputs of the network, so that the runtime can drop none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from qtrace.costs import Measurement, OpShape

__all__ = [
    "FEW",
    "LEAST_SECONDS",
    "MANY",
    "PASSES",
    "Opener",
    "Run",
    "least_time",
    "measure_copies",
    "time_apart",
]

FEW, MANY = 1, 4
"""The copies in the two networks."""
LEAST_SECONDS = 3e-7
"""What an op takes at least; differences of small ones are lost in the clock."""
_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS_PER_CASE = 6, 200, 0.06
PASSES = 2
"""How often all ops are timed: other work that lasts a while disturbs one pass only."""
_MOST_SECONDS = 240.0  # then the last pass ends

Run: TypeAlias = Callable[[], object]
Opener: TypeAlias = Callable[[OpShape, str, int], "Run | None"]
"""Opens a network of copies of an op in a form; None if the runtime does not have this form."""


def measure_copies(
    grid: Sequence[tuple[OpShape, str]],
    open_network: Opener,
    *,
    per_copy: float = 0.0,
    progress: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Returns the times of the ops that the runtime has.

    Args:
        grid: the ops and their forms.
        open_network: opens a network of copies.
        per_copy: what a copy takes besides its op.
        progress: called after each op, of which there are `PASSES` times as many as in the grid.
    """
    best: dict[tuple[OpShape, str], float] = {}
    end = time.perf_counter() + _MOST_SECONDS
    for number in range(PASSES):
        for op, form in grid:
            if number and time.perf_counter() > end:
                break
            few = open_network(op, form, FEW)
            many = None if few is None else open_network(op, form, MANY)
            if few is not None and many is not None:
                seconds = time_apart(few, many) / (MANY - FEW) - per_copy
                best[op, form] = min(max(seconds, LEAST_SECONDS), best.get((op, form), float("inf")))
            progress()
    return [Measurement(op, form, seconds) for (op, form), seconds in best.items()]


def time_apart(few: Run, many: Run) -> float:
    """Returns the difference of the least times of two networks that take turns."""
    least, spent = [1e9, 1e9], 0.0
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and spent > _SECONDS_PER_CASE:
            break
        for index, run in enumerate((few, many)):
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            least[index] = min(least[index], seconds)
            spent += seconds
    return least[1] - least[0]


def least_time(run: Run, rounds: int = 300) -> float:
    """Returns the least time of a run."""
    best = 1e9
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
