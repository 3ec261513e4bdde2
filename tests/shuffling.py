"""``qtrace`` with workers that get random shares of the batches: ``python -m tests.shuffling COUNT ARGS``."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from qtrace import cli
from qtrace.calibration import running
from qtrace.calibration.running import WorkerJob
from qtrace.workers import Outcome, Pool

__all__ = ["Shuffled"]


class Shuffled:
    """Gives every job a random share of the batches, in place of every N-th.

    Args:
        inner: runs the jobs.
        count: number of all batches.
    """

    def __init__(self, inner: Pool, count: int) -> None:
        self.inner, self.count = inner, count

    def __enter__(self) -> Shuffled:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)

    def run(self, jobs: Sequence[WorkerJob], progress: Callable[[int], None]) -> Iterable[Outcome]:
        rng = random.Random(len(jobs))
        owners = [rng.randrange(len(jobs)) for _ in range(self.count)]
        shares = []
        for index, job in enumerate(jobs):
            others = {number for number, owner in enumerate(owners) if owner != index}
            finished = tuple(sorted({*job.done, *others}))
            shares.append(dataclasses.replace(job, shard=0, shards=1, done=finished))
        rng.shuffle(shares)
        return self.inner.run(shares, progress)


def main(count: int, args: list[str]) -> None:
    pool = running._pool
    running._pool = lambda *arguments: Shuffled(pool(*arguments), count)
    cli.main(args)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
