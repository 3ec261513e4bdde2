"""How long block reconstruction takes, and how much of that are gradients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megengine.autodiff import GradManager

from benchmarks.accuracy.four_bits import low_bits
from benchmarks.accuracy.judging import quantize
from benchmarks.accuracy.rows import Row
from benchmarks.accuracy.subjects import Subject

__all__ = ["run"]

ITERATIONS = 1000


def run(subject: Subject, iterations: int | None) -> Iterator[Row]:
    """Block reconstruction with QDrop at W4A4; seconds of this process, whatever else ran on the machine."""
    iterations = iterations or ITERATIONS
    spent: list[float] = []
    started, wall = time.process_time(), time.monotonic()
    with _timed_backward(spent):
        quantize(subject, low_bits(4, {"reconstruct": {"iterations": iterations}}))
    processor, wall = time.process_time() - started, time.monotonic() - wall
    share = sum(spent) / processor
    note = (
        f"{processor:.0f} s of processor ({wall:.0f} s on the clock), {100 * share:.0f} % of it in gradients"
    )
    yield Row("reconstruction time", subject.name, f"reconstruct, {iterations} iterations a block", note=note)


@contextmanager
def _timed_backward(spent: list[float]) -> Iterator[None]:
    """Notes the processor time of every backward pass while the block runs."""
    original = GradManager.backward

    def timed(*args: object, **options: object) -> object:
        started = time.process_time()
        try:
            return original(*args, **options)
        finally:
            spent.append(time.process_time() - started)

    GradManager.backward = timed
    try:
        yield
    finally:
        GradManager.backward = original
