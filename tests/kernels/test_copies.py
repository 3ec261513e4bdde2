"""An op takes what more copies of it take longer."""

from __future__ import annotations

import pytest

from benchmarks.kernels import copies
from benchmarks.kernels.copies import FEW, LEAST_SECONDS, MANY, PASSES, measure_copies
from qtrace.costs import FLOAT, INTEGER, OpShape

OP = OpShape("relu", ((1, 4),), ((1, 4),))


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves when a network runs only."""
    now = [0.0]
    monkeypatch.setattr(copies.time, "perf_counter", lambda: now[0])
    return now


def test_time_of_an_op_is_averaged_over_copies(clock):
    delays = iter([5.0, *[0.0] * 1000])  # another program disturbs the first run

    def open_network(op, form, count):
        def run():
            clock[0] += 0.25 + 0.5 * count + next(delays)

        return run if form == FLOAT else None

    done = []
    pairs = [(OP, FLOAT), (OP, INTEGER)]
    (measurement,) = measure_copies(pairs, open_network, per_copy=0.125, progress=lambda: done.append(1))
    assert (measurement.op, measurement.form) == (OP, FLOAT)
    assert measurement.seconds == pytest.approx(0.375)
    assert len(done) == PASSES * len(pairs)


def test_no_op_takes_no_time(clock):
    (measurement,) = measure_copies([(OP, FLOAT)], lambda op, form, count: lambda: None)
    assert measurement.seconds == LEAST_SECONDS
    assert MANY > FEW
