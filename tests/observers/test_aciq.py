"""Clipping values of the paper, and ranges against the moments of the data."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import laplace as laplacian
from scipy.stats import norm

from qtrace.observers.aciq import AnalyticalClipping, gauss, laplace
from qtrace.scheme import QScheme
from tests.each import each_of

RNG = np.random.default_rng(11)
SYMMETRIC = QScheme(bits=4, signed=True, symmetric=True)


def test_the_clipping_values_of_the_paper():
    assert [laplace(2**m) for m in (2, 3, 4)] == pytest.approx([2.83, 3.89, 5.03], abs=0.01)
    assert [gauss(2**m) for m in (2, 3, 4)] == pytest.approx([1.71, 2.15, 2.55], abs=0.01)
    # With one sign (fused ReLU) there are as many levels on half of the range.
    assert [laplace(2 * 2**m) for m in (2, 3, 4)] == pytest.approx([3.89, 5.03, 6.2], abs=0.01)


@each_of("steps", [3, 14, 255, 65535])
@each_of(("form", "law"), [(gauss, norm), (laplace, laplacian)])
def test_they_minimise_the_error_of_clipping_and_uniform_noise(form, law, steps):
    def cost(reach):
        x = np.linspace(reach, reach + 40, 20001)
        return 2 * np.trapz((x - reach) ** 2 * law.pdf(x), x) + (2 * reach / steps) ** 2 / 12

    best = minimize_scalar(cost, bounds=(0.5, 30), method="bounded", options={"xatol": 1e-6})
    assert cost(form(steps)) <= best.fun * (1 + 1e-3)


def ranged(x, scheme, **options):
    observer = AnalyticalClipping(scheme, **options)
    for part in np.array_split(x.astype(np.float32), 3):
        observer.observe(part)
    return observer.range()


@pytest.mark.parametrize(("distribution", "form"), [("gauss", gauss), ("laplace", laplace)])
def test_ranges_follow_the_moments_of_the_data(distribution, form):
    x = RNG.laplace(size=30000) * 0.7 + 2.0
    x[:100] = 0.0

    def spread(values, centre):
        off = values - centre
        return np.sqrt(np.mean(off**2)) if distribution == "gauss" else np.mean(np.abs(off))

    some = x[x != 0]
    affine, options = QScheme(bits=4), {"distribution": distribution}
    reach = form(15) * spread(some, some.mean())
    assert ranged(x, affine, **options) == pytest.approx((some.mean() - reach, some.mean() + reach), rel=1e-3)
    reach = form(14) * spread(some, 0.0)
    want = max(-reach, x.min()), min(reach, x.max())
    assert ranged(x, SYMMETRIC, **options) == pytest.approx(want, rel=1e-3)
    positive = np.maximum(x - 2.0, 0)
    reach = form(30) * spread(positive[positive > 0], 0.0)
    assert ranged(positive, affine, **options) == (0.0, pytest.approx(reach, rel=2e-3))
    assert ranged(-positive, affine, **options) == (pytest.approx(-reach, rel=2e-3), 0.0)


def test_auto_takes_the_likelier_distribution():
    for x, name in ((RNG.normal(size=20000), "gauss"), (RNG.laplace(size=20000), "laplace")):
        assert ranged(x, SYMMETRIC) == ranged(x, SYMMETRIC, distribution=name)


@each_of("value", [0.0, 3.0, -3.0])
def test_a_constant_keeps_its_value(value):
    lo, hi = ranged(np.full(50, value), QScheme(bits=4))
    assert lo <= value <= hi
    assert max(-lo, hi) == abs(value)
