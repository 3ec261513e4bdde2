from __future__ import annotations

import numpy as np
import pytest

from qtrace.observers.moving_average import MovingAverage
from qtrace.observers.moving_percentile import MovingPercentile
from qtrace.scheme import QScheme
from tests.each import each_of

RNG = np.random.default_rng(2)
BATCHES = [RNG.normal(size=(4, 3, 100)) * (1 + i) for i in range(5)]


def observed(batches, cls=MovingPercentile, scheme=None, **options):
    observer = cls(scheme or QScheme(), **options)
    for index, batch in enumerate(batches):
        observer.observe(batch, batch=index)
    return observer


@each_of("percentile", [60.0, 99.0, 99.9])
def test_is_the_average_of_what_sorting_gives(percentile):
    scheme = QScheme(axis=1)
    lo, hi = observed(BATCHES, scheme=scheme, percentile=percentile, momentum=0.8).range()
    cut = int(np.floor(round(400 * (100 - percentile) / 100, 6)))
    for channel in range(3):
        ends = [np.sort(b[:, channel].astype(np.float32).ravel())[[cut, -1 - cut]] for b in BATCHES]
        average = ends[0].astype(np.float64)
        for end in ends[1:]:
            average = 0.8 * average + 0.2 * end
        assert (lo[channel], hi[channel]) == (pytest.approx(average[0]), pytest.approx(average[1]))


def test_a_hundred_percent_is_the_moving_average():
    assert observed(BATCHES, percentile=100.0).range() == observed(BATCHES, MovingAverage).range()


def test_moving_percentile_ignores_one_outlier():
    wild = [batch.copy() for batch in BATCHES]
    wild[-1][0, 0, 0] = 1e6
    assert observed(wild, percentile=99.0).range()[1] < 2 * observed(BATCHES, percentile=99.0).range()[1]
    assert observed(wild, MovingAverage).range()[1] > 1e4
