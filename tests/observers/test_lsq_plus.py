from __future__ import annotations

import numpy as np
import pytest

from qtrace.observers.lsq_plus import LSQPlusInitialization
from qtrace.scheme import QScheme

RNG = np.random.default_rng(3)


def observed(x, scheme=None, **options):
    observer = LSQPlusInitialization(scheme or QScheme(), **options)
    for part in np.array_split(x.astype(np.float32), 4):
        observer.observe(part)
    return observer


@pytest.mark.parametrize("sigmas", [1.5, 3.0])
def test_is_mean_and_deviation_of_the_data(sigmas):
    x = np.concatenate([RNG.normal(size=20000) * 0.2 + 0.1, np.zeros(5000), [7.0, -7.0]])
    reach = sigmas * x.std()
    want = x.mean() - reach, x.mean() + reach
    assert observed(x, sigmas=sigmas).range() == pytest.approx(want, rel=2e-3)


def test_symmetric_weights_get_the_scale_of_the_paper():
    x = RNG.normal(size=50000) * 0.05 - 0.01
    scheme = QScheme(bits=4, signed=True, symmetric=True)
    bound = max(abs(x.mean() - 3 * x.std()), abs(x.mean() + 3 * x.std()))
    assert float(observed(x, scheme).qparams().scale) == pytest.approx(bound / 7, rel=2e-3)


def test_lsq_plus_range_stays_within_the_data():
    assert observed(np.linspace(-1, 1, 999)).range() == (-1.0, 1.0)
    assert observed(np.full(9, 2.5)).range() == pytest.approx((2.5, 2.5), rel=1e-3)
