from __future__ import annotations

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


@given(BATCHES, st.floats(0, 0.99))
def test_is_the_recursive_average_corrected_for_its_start(batches, momentum):
    lo = hi = 0.0
    for batch in batches:
        lo = momentum * lo + (1 - momentum) * min(batch)
        hi = momentum * hi + (1 - momentum) * max(batch)
    correction = 1 - momentum ** len(batches)
    got = observed(batches, momentum).range()
    assert got == (pytest.approx(lo / correction, abs=1e-9), pytest.approx(hi / correction, abs=1e-9))


def test_extreme_momenta():
    batches = [[-1.0, 1.0], [-2.0, 5.0], [-6.0, 3.0]]
    assert observed(batches, 0).range() == (-6.0, 3.0)
    assert observed(batches, 1).range() == (-3.0, 3.0)
    assert observed([[2.0]] * 3000, 0.5).range() == (2.0, 2.0)


def test_order_is_that_of_the_index_not_of_arrival():
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
