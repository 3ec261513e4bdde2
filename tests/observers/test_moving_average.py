from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtrace.observers.moving_average import MovingAverage
from qtrace.scheme import QScheme

BATCHES = st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=3), min_size=1, max_size=12)


def observed(batches, momentum=0.9):
    observer = MovingAverage(QScheme(), momentum=momentum)
    for index, batch in enumerate(batches):
        observer.observe(np.array(batch), batch=index)
    return observer


@given(BATCHES, st.floats(0, 1))
def test_is_the_recursive_average_that_begins_with_the_first_batch(batches, momentum):
    lo, hi = np.float64(min(batches[0])), np.float64(max(batches[0]))
    for batch in batches[1:]:
        lo = momentum * lo + (1 - momentum) * min(batch)
        hi = momentum * hi + (1 - momentum) * max(batch)
    assert observed(batches, momentum).range() == (lo, hi)


def test_the_weights_of_the_batches():
    n, m = 5, 0.75
    for first in range(n):
        batches = [[float(index == first)] for index in range(n)]
        weight = m ** (n - 1) if first == 0 else (1 - m) * m ** (n - 1 - first)
        assert observed(batches, m).range()[1] == pytest.approx(weight)


def test_agrees_with_megengine():
    batches = np.random.RandomState(0).randn(6, 50).astype(np.float32) * 3
    # In a process of its own: MegEngine makes the processor flush the subnormals that other tests draw.
    code = (
        "import json, sys, megengine\n"
        "from megengine.quantization.observer import ExponentialMovingAverageObserver\n"
        "observer = ExponentialMovingAverageObserver(momentum=0.9)\n"
        "for batch in json.load(sys.stdin): observer(megengine.Tensor(batch))\n"
        "print(observer.min_val.item(), observer.max_val.item())"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, input=json.dumps(batches.tolist()), capture_output=True, text=True, check=True)
    lo, hi = map(float, done.stdout.split()[-2:])
    assert observed(batches).range() == (pytest.approx(lo, rel=1e-5), pytest.approx(hi, rel=1e-5))


def test_extreme_momenta():
    batches = [[-1.0, 1.0], [-2.0, 5.0], [-6.0, 3.0]]
    assert observed(batches, 0).range() == (-6.0, 3.0)
    assert observed(batches, 1).range() == (-1.0, 1.0)
    assert observed([[2.0]] * 3000, 0.5).range() == (2.0, 2.0)


def test_moving_average_orders_batches_by_index():
    batches = [[-1.0, 1.0], [-2.0, 5.0], [-6.0, 3.0]]
    observer = MovingAverage(QScheme())
    for index in (2, 0, 1):
        observer.observe(np.array(batches[index]), batch=index)
    assert observer.range() == observed(batches).range()
    assert observer.range() != observed(batches[::-1]).range()


def test_without_an_index_batches_are_counted():
    counted = MovingAverage(QScheme())
    for batch in ([1.0], [2.0], [5.0]):
        counted.observe(np.array(batch))
    assert counted.range() == observed([[1.0], [2.0], [5.0]]).range()
    assert counted.state_dict()["batch"].tolist() == [0, 1, 2]


def test_merging_is_associative_when_indices_repeat():
    def one(value):
        observer = MovingAverage(QScheme())
        observer.observe(np.array([value]))
        return observer

    a, b, c = one(1.0), one(2.0), one(5.0)
    left, right = a.merge(b).merge(c), a.merge(b.merge(c))
    assert left.range() == right.range() == observed([[1.0], [2.0], [5.0]]).range()
