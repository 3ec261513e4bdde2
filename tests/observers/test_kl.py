"""The relative entropy against a loop over bins, and the search against all ranges."""

from __future__ import annotations

import numpy as np
import pytest

from qtrace.numerics import grid
from qtrace.observers.kl import KullbackLeibler, divergence
from qtrace.observers.statistics import tables
from qtrace.scheme import QScheme
from tests.each import each_of

RNG = np.random.default_rng(5)
DATA = {
    "gauss": RNG.normal(size=3000),
    "relu": np.maximum(RNG.normal(size=3000), 0),
    "outliers": np.concatenate([RNG.normal(size=3000), [9.0, -4.0]]),
    "gaps": np.concatenate([RNG.normal(size=500) * 0.1, RNG.normal(size=500) * 0.1 + 3]),
    "negative": -np.abs(RNG.laplace(size=3000)),
}
SCHEMES = [
    QScheme(bits=4),
    QScheme(bits=4, signed=True, symmetric=True, narrow=True),
    QScheme(bits=3, signed=True, symmetric=True),
    QScheme(bits=5, power_of_two=True),
]


def entropy_of(state, lo, hi, scheme):
    """KL(P || Q) as Migacz describes it, bin by bin."""
    scale, zero_point = (float(a) for a in grid(lo, hi, scheme))
    width, counts = 2.0 ** float(state["exponent"][0]), state["counts"][0].astype(np.float64)
    origin = int(np.floor(min(float(state["lo"][0]), 0) / width))
    if scale < width:
        return np.inf
    counts[-origin] -= state["zeros"][0]
    middle = (origin + np.arange(counts.size) + 0.5) * width
    q = np.floor(middle / scale + zero_point + 0.5)
    inside = (q >= scheme.qmin) & (q <= scheme.qmax)
    reference = np.where(inside, counts, 0.0)
    first, last = np.flatnonzero(inside)[[0, -1]]
    reference[first] += counts[:first].sum()
    reference[last] += counts[last + 1 :].sum()
    candidate = np.zeros_like(reference)
    for level in range(scheme.qmin, scheme.qmax + 1):
        cell = (q == level) & (reference > 0)
        if cell.any():
            candidate[cell] = counts[(q == level) & inside].sum() / cell.sum()
    p, c = reference / reference.sum(), candidate / candidate.sum()
    if (c[p > 0] == 0).any():
        return np.inf
    return float(np.sum(p[p > 0] * np.log(p[p > 0] / c[p > 0])))


def state_of(x, scheme, bins=64):
    observer = KullbackLeibler(scheme, bins=bins)
    observer.observe(x)
    return observer.state_dict()


@each_of("name", DATA)
@each_of("scheme", SCHEMES, ids=QScheme.describe)
def test_all_ranges_at_once_equal_a_loop_over_bins(scheme, name):
    state = state_of(DATA[name], scheme)
    lo, hi = min(float(state["lo"][0]), 0.0), max(float(state["hi"][0]), 0.0)
    los, his = lo * RNG.uniform(0.1, 1, 60), hi * RNG.uniform(0.1, 1, 60)
    los[0], his[0] = lo, hi
    got = divergence(tables(state), los[None], his[None], scheme)[0]
    want = [entropy_of(state, a, b, scheme) for a, b in zip(los, his, strict=True)]
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert np.isfinite(got[0])


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("scheme", SCHEMES, ids=QScheme.describe)
def test_the_range_is_the_best_of_those_tried(scheme, name):
    observer = KullbackLeibler(scheme, bins=64, candidates=64)
    observer.observe(DATA[name])
    state = observer.state_dict()
    lo, hi = min(float(state["lo"][0]), 0.0), max(float(state["hi"][0]), 0.0)
    width = 2.0 ** float(state["exponent"][0])
    least = min(width / float(grid(lo, hi, scheme)[0]), 1.0)
    tried = [(lo * r, hi * r) for r in 1 - (1 - least) * np.linspace(0, 1, 64)]
    costs = [entropy_of(state, a, b, scheme) for a, b in tried]
    chosen = entropy_of(state, *observer.range(), scheme)
    if scheme.symmetric or lo == 0 or hi == 0:
        assert chosen == pytest.approx(min(costs), rel=1e-9)
    else:
        assert chosen <= min(costs) * (1 + 1e-9)


def test_far_outliers_are_clipped_and_a_uniform_tensor_is_not():
    scheme = QScheme(bits=8, signed=True, symmetric=True)
    x = RNG.normal(size=200000)
    x[0] = 40.0
    observer = KullbackLeibler(scheme)
    observer.observe(x)
    assert 2.5 < observer.range()[1] < 12
    flat = KullbackLeibler(scheme)
    flat.observe(np.linspace(-1, 1, 200000))
    assert flat.range()[1] > 0.98


def test_levels_closer_than_bins_keep_the_whole_range():
    observer = KullbackLeibler(QScheme(bits=16), bins=64)
    observer.observe(np.array([-1.0, 0.1, 3.0]))
    assert observer.range() == (-1.0, 3.0)


@pytest.mark.parametrize("values", [9, 27, 144])
def test_channels_of_few_values_keep_their_range(values):
    """At 8 bits a depthwise weight has 9 values for 256 levels: clipping any of them is never worth it."""
    weight = np.random.default_rng(values).normal(size=(32, values)).astype(np.float32)
    observer = KullbackLeibler(QScheme(bits=8, signed=True, symmetric=True, axis=0))
    observer.observe(weight)
    lo, hi = observer.range()
    np.testing.assert_allclose(np.maximum(-lo, hi), np.abs(weight).max(axis=1), rtol=1e-6)
