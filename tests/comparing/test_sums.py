"""SQNR, cosine and agreement: their conventions, and that the sums of batches merge."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from threadpoolctl import threadpool_limits

from qtrace.comparing.sums import ErrorSums, comparable, decibels, errors_of, finite_or_none, sqnr_db
from qtrace.errors import QtraceError
from qtrace.numerics import choose, fake_quantize
from qtrace.scheme import QScheme
from tests.each import each_of

ROWS = st.integers(1, 4)
# Whole numbers, whose sums of products float64 holds exactly: merging is then exactly associative.
WHOLE = st.integers(-1000, 1000).map(float)


def _sums(reference, test):
    sums = ErrorSums()
    sums.add(reference, test, classes=True)
    return sums


def test_sqnr():
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    assert sqnr_db(x, x) == np.inf
    assert sqnr_db(np.zeros(3), np.ones(3)) == -np.inf
    assert sqnr_db([3.0, 4.0], [3.0, 3.5]) == pytest.approx(20.0)
    assert sqnr_db(np.zeros(3), np.zeros(3)) == np.inf
    with pytest.raises(QtraceError, match=r"\(1000,\)"):
        sqnr_db(x, x[:-1])
    # Uniform noise: 6.02 dB a bit (Bennett 1948).
    u = np.random.default_rng(0).uniform(-1, 1, 100000)
    eight = sqnr_db(u, fake_quantize(u, choose(-1, 1, QScheme(bits=8))))
    nine = sqnr_db(u, fake_quantize(u, choose(-1, 1, QScheme(bits=9))))
    assert nine - eight == pytest.approx(6.02, abs=0.1)


@pytest.mark.parametrize("size", [100, 20_000, 1_000_003])
def test_sums_are_the_same_for_any_number_of_blas_threads(size: int) -> None:
    """A file holds them, and has the same bytes then."""
    rng = np.random.default_rng(size)
    reference, test = (rng.normal(size=size).astype(np.float32) for _ in range(2))
    found = []
    for threads in (1, 2, 3):
        with threadpool_limits(limits=threads, user_api="blas"):
            found.append(_sums(reference, test))
    assert found[0] == found[1] == found[2]
    exact = math.fsum(float(value) ** 2 for value in reference)
    assert found[0].signal == pytest.approx(exact, rel=1e-12)


@st.composite
def _pairs(draw):
    shape = (draw(ROWS), 3)
    return draw(arrays(np.float64, shape, elements=WHOLE)), draw(arrays(np.float64, shape, elements=WHOLE))


@given(_pairs(), _pairs(), _pairs())
def test_merging_is_associative_commutative_and_equals_the_whole(first, second, third):
    a, b, c = (_sums(*pair) for pair in (first, second, third))
    whole = _sums(*(np.concatenate(side) for side in zip(first, second, third, strict=True)))
    assert (a + b) + c == a + (b + c) == c + (b + a) == whole
    assert whole + ErrorSums() == whole
    assert ((a + b) + c).sqnr_db == whole.sqnr_db


FLOATS = st.floats(-1e6, 1e6, width=32)


@given(
    arrays(np.float32, st.tuples(ROWS, st.just(5)), elements=FLOATS),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_batches_of_floats_merge_to_the_whole_up_to_rounding(reference, count, random):
    test = reference + np.float32(random.uniform(-1, 1))
    merged = ErrorSums()
    for f, q in zip(np.array_split(reference, count), np.array_split(test, count), strict=True):
        merged.add(f, q)
    whole = _sums(reference, test)
    for name in ("signal", "power", "product", "noise"):
        assert getattr(merged, name) == pytest.approx(getattr(whole, name), rel=1e-9, abs=1e-6)


@each_of(
    ("signal", "noise", "ratio"),
    [
        (1.0, 0.0, math.inf),
        (0.0, 0.0, math.inf),
        (0.0, 1.0, -math.inf),
        (1.0, math.inf, -math.inf),
        (math.inf, math.inf, -math.inf),
        (1.0, math.nan, -math.inf),
        (100.0, 1.0, 20.0),
        (1e300, 1e-300, 6000.0),
    ],
)
def test_decibels_of_zero_and_infinite_noise(signal, noise, ratio):
    assert decibels(signal, noise) == pytest.approx(ratio)
    assert finite_or_none(ratio) == (ratio if math.isfinite(ratio) else None)


def test_values_that_are_not_finite():
    f = np.array([1.0, np.inf, np.nan, -np.inf])
    equal = _sums(f, f.copy())
    assert equal.sqnr_db == np.inf
    assert (equal.signal, equal.values) == (1.0, 4)
    assert sqnr_db(f, np.array([1.0, 2.0, np.nan, -np.inf])) == -np.inf  # finite on one side only
    assert sqnr_db(f, np.array([1.0, -np.inf, np.nan, -np.inf])) == -np.inf
    assert sqnr_db(f, np.array([1.5, np.inf, np.nan, -np.inf])) == pytest.approx(10 * math.log10(1 / 0.25))


def test_errors_of_values_that_are_not_finite():
    f, q = np.array([1, np.inf, np.nan, 1, np.nan, np.inf]), np.array([3, np.inf, np.nan, np.nan, 1, -np.inf])
    np.testing.assert_array_equal(np.abs(errors_of(f, q)), [2, 0, 0, np.inf, np.inf, np.inf])


def test_cosine_and_agreement():
    f = np.array([[3.0, 4.0], [1.0, 0.0]])
    q = np.array([[4.0, 3.0], [1.0, 0.0]])
    sums = _sums(f, q)
    assert sums.cosine == pytest.approx(25 / 26)
    assert sums.agreement == 0.5
    assert _sums(np.zeros((2, 2)), np.zeros((2, 2))).cosine == 1.0
    assert _sums(np.zeros((2, 2)), np.ones((2, 2))).cosine == 0.0
    assert _sums(f[0], q[0]).agreement is None
    assert _sums(np.zeros((0, 3)), np.zeros((0, 3))).agreement is None


def test_what_is_comparable():
    f = np.zeros((2, 3), np.float32)
    assert comparable(f, f)
    assert not comparable(f, f[:1])
    assert not comparable(f.astype(np.int32), f.astype(np.int32))
