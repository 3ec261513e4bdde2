from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import floor

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qtrace.observers import statistics
from qtrace.observers.mse import MeanSquaredError
from qtrace.scheme import QScheme
from tests.each import each_of

BINS = 64
VALUES = st.one_of(
    st.floats(-3, 3, width=32),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 64.0, -64.0, 2.0**127, -(2.0**127)]),
)


def state_of(*batches, bins=BINS, **scheme):
    observer = MeanSquaredError(QScheme(**scheme), bins=bins)
    for batch in batches:
        observer.observe(np.array(batch, np.float32))
    return observer.state_dict()


def reference(values):
    """The least k from -126 at which the bins floor(x / 2**k) fit, and their counts; in exact arithmetic."""
    exact = [Fraction(float(np.float32(value))) for value in values]
    lo, hi = min(*exact, Fraction(0)), max(*exact, Fraction(0))
    k = -126
    while floor(hi / Fraction(2) ** k) - floor(lo / Fraction(2) ** k) + 1 > 2 * BINS:
        k += 1
    return k, floor(lo / Fraction(2) ** k), Counter(floor(x / Fraction(2) ** k) for x in exact)


@settings(max_examples=60)
@given(st.lists(VALUES, min_size=1, max_size=20), st.integers(0, 20))
def test_counts_agree_with_exact_arithmetic(values, cut):
    first, second = values[:cut], values[cut:]
    state = state_of(*(part for part in (first, second) if part))
    k, origin, counts = reference(values)
    assert state["exponent"].tolist() == [k]
    assert statistics.origin_of(state["lo"], state["exponent"]).tolist() == [origin]
    assert {origin + i: n for i, n in enumerate(state["counts"][0].tolist()) if n} == counts
    assert state["zeros"] == sum(value == 0 for value in values)
    assert (state["lo"], state["hi"]) == (min(values), max(values))


def test_resolution_lies_between_bins_and_twice_as_many():
    for top in np.geomspace(1e-30, 1e30, 200):
        state = state_of([-top / 3, top])
        used = (top * 4 / 3) / 2.0 ** float(state["exponent"][0])
        assert BINS - 2 <= used <= 2 * BINS


@each_of("shape", [(3, 5, 4000), (40, 5, 77), (1, 500, 200), (3000, 5), (2, 5, 70000)])
def test_blocks_cover_every_element_once(shape):
    rng = np.random.default_rng(0)
    x = np.round(rng.normal(size=shape), 1) * rng.uniform(
        0.01, 100, size=(shape[1],) + (1,) * (len(shape) - 2)
    )
    x = x.astype(np.float32)
    state = state_of(x, axis=1)
    for c in range(shape[1]):
        values = x[:, c].ravel().astype(np.float64)
        width = 2.0 ** float(state["exponent"][c])
        origin = np.floor(min(values.min(), 0) / width)
        expected = np.bincount((np.floor(values / width) - origin).astype(int), minlength=2 * BINS)
        assert np.array_equal(state["counts"][c], expected)
        assert state["zeros"][c] == np.sum(values == 0)


def test_a_large_tensor_is_counted_whole():
    x = np.random.default_rng(0).normal(size=1_000_003).astype(np.float32)
    state = state_of(x, bins=2048)
    expected = np.histogram(
        x.astype(np.float64),
        2.0 ** float(state["exponent"][0])
        * (np.arange(4097) + statistics.origin_of(state["lo"], state["exponent"])[0]),
    )[0]
    assert np.array_equal(state["counts"][0], expected)


def test_a_range_that_grows_a_lot_keeps_every_count():
    state = state_of([0.0], [1e-38] * 3, [-1e-45], [1e38], [-2.0])
    assert state["counts"].sum() == 7
    assert state["zeros"] == 1
