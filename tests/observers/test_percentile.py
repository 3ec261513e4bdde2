from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtrace.observers.minmax import MinMax
from qtrace.observers.percentile import Percentile
from qtrace.scheme import QScheme
from tests.each import each_of

RNG = np.random.default_rng(0)
DATA = {
    "gauss": RNG.normal(size=20000),
    "laplace": RNG.laplace(size=20000),
    "relu": np.maximum(RNG.normal(size=20000), 0),
    "far from zero": RNG.normal(size=20000) + 100,
    "outliers": np.concatenate([RNG.normal(size=19999), [500.0]]),
}


def observed(x, percentile, bins=2048):
    observer = Percentile(QScheme(), percentile=percentile, bins=bins)
    for part in np.array_split(x.astype(np.float32), min(7, x.size)):
        observer.observe(part)
    return observer


@each_of("percentile", [60, 90, 99, 99.9, 99.99])
@each_of("name", DATA)
def test_agrees_with_the_sorted_data_to_a_bin(name, percentile):
    x = DATA[name].astype(np.float32)
    observer = observed(x, percentile)
    bin_width = 2.0 ** float(observer.state_dict()["exponent"][0])
    ordered = np.sort(x)
    cut = int(np.round(x.size * (100 - percentile) / 100, 6))
    lo, hi = observer.range()
    assert abs(lo - ordered[cut]) <= bin_width
    assert abs(hi - ordered[-1 - cut]) <= bin_width


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50))
def test_a_hundred_percent_is_the_minimum_and_the_maximum(values):
    minmax = MinMax(QScheme())
    minmax.observe(np.array(values))
    assert observed(np.array(values), 100, 64).range() == minmax.range()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50), st.floats(51, 100))
def test_range_is_ordered_and_inside(values, percentile):
    observer = Percentile(QScheme(), percentile=percentile, bins=64)
    observer.observe(np.array(values))
    lo, hi = observer.range()
    assert min(values) <= lo <= hi <= max(values)


def test_clips_the_share_that_was_asked_for():
    x = DATA["laplace"].astype(np.float32)
    lo, hi = observed(x, 99.0).range()
    assert np.mean(x < lo) == pytest.approx(0.01, abs=2e-3)
    assert np.mean(x > hi) == pytest.approx(0.01, abs=2e-3)


def test_one_outlier_in_ten_thousand_is_cut_at_the_default():
    x = np.linspace(-1, 1, 10000)
    x[5] = 1000.0
    observer = Percentile(QScheme())
    observer.observe(x)
    assert observer.range()[1] < 2.0
