from __future__ import annotations

import numpy as np
import pytest

from qtrace.numerics import fake_quantize, grid
from qtrace.observers.cosine import Cosine
from qtrace.observers.statistics import dissimilarity, tables
from qtrace.scheme import QParams, QScheme
from tests.each import each_of
from tests.observers.test_mse import DATA, SCHEMES, spread


@each_of("name", ["gauss", "sparse", "outliers", "silu"])
@each_of("scheme", [*SCHEMES, QScheme(bits=2), QScheme(bits=10), QScheme(bits=11)], ids=QScheme.describe)
def test_closed_form_is_the_integral_over_the_histogram(scheme, name):
    observer = Cosine(scheme, bins=128)
    observer.observe(DATA[name])
    state = observer.state_dict()
    lo, hi = min(float(state["lo"][0]), 0.0), max(float(state["hi"][0]), 0.0)
    los, his = np.array([[1.0, 0.7, 0.2, 1.0, 0.05]]) * lo, np.array([[1.0, 0.7, 0.2, 0.1, 0.05]]) * hi
    scale, zero_point = (a[0].astype(np.float64)[:, None] for a in grid(los, his, scheme))
    x, weight = spread(state, 400)
    y = (np.clip(np.rint(x / scale) + zero_point, scheme.qmin, scheme.qmax) - zero_point) * scale
    want = 1 - (weight * x * y).sum(axis=1) / np.sqrt((weight * y * y).sum(axis=1) * (weight * x * x).sum())
    assert dissimilarity(tables(state), los, his, scheme)[0] == pytest.approx(want, rel=2e-3, abs=2e-9)


def cosine(x, lo, hi, scheme):
    y = fake_quantize(x, QParams(scheme, *grid(lo, hi, scheme)))
    return float(x @ y / np.sqrt((x @ x) * (y @ y))) if y.any() else 0.0


@pytest.mark.parametrize("name", ["gauss", "relu", "outliers", "skewed"])
@pytest.mark.parametrize("scheme", SCHEMES[:4], ids=QScheme.describe)
def test_is_as_good_as_brute_force_on_the_data(scheme, name):
    x = DATA[name].astype(np.float32).astype(np.float64)
    observer = Cosine(scheme)
    observer.observe(x)
    lo, hi = min(x.min(), 0.0), max(x.max(), 0.0)
    ratios = np.exp2(-np.arange(60) / 10)
    pairs = (
        [(r, r) for r in ratios] if scheme.symmetric else [(a, b) for a in ratios[::3] for b in ratios[::3]]
    )
    best = max(cosine(x, lo * a, hi * b, scheme) for a, b in pairs)
    assert 1 - cosine(x, *observer.range(), scheme) <= (1 - best) * 1.02


def test_nothing_but_zeros_keeps_its_range():
    observer = Cosine(QScheme())
    observer.observe(np.zeros(5))
    assert observer.range() == (0.0, 0.0)
