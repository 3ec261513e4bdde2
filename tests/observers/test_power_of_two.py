from __future__ import annotations

import numpy as np
import pytest

from qtrace.observers.power_of_two import PowerOfTwo
from qtrace.scheme import QScheme
from tests.each import each_of
from tests.observers.test_mse import DATA, true_error

SCHEMES = [
    QScheme(bits=3),
    QScheme(bits=5, narrow=True),
    QScheme(bits=4, signed=True, power_of_two=True),
    QScheme(bits=4, signed=True, symmetric=True),
    QScheme(bits=6, symmetric=True, power_of_two=True),
]


@each_of("name", DATA)
@each_of("scheme", SCHEMES, ids=QScheme.describe)
def test_no_power_of_two_and_no_zero_point_is_better(scheme, name):
    x = DATA[name].astype(np.float32).astype(np.float64)
    observer = PowerOfTwo(scheme)
    observer.observe(x)
    params = observer.qparams()
    assert np.frexp(params.scale)[0] == 0.5
    ours = true_error(x, [params.scale], [params.zero_point], scheme)[0]
    zeros = [scheme.symmetric_zero_point] if scheme.symmetric else range(scheme.qmin, scheme.qmax + 1)
    every = [(2.0**e, z) for e in range(-10, 8) for z in zeros]
    best = true_error(x, *zip(*every, strict=True), scheme).min()
    assert ours <= best * 1.01 + 1e-12


@pytest.mark.parametrize("bits", [8, 16])
def test_wide_schemes_cover_everything(bits):
    x = np.linspace(-0.3, 1.1, 999)
    observer = PowerOfTwo(QScheme(bits=bits, power_of_two=True))
    observer.observe(x)
    lo, hi = observer.range()
    step = float(observer.qparams().scale)
    assert lo - step / 2 <= -0.3
    assert hi + step / 2 >= 1.1


def test_channels_far_apart_each_get_their_own():
    x = np.stack([np.linspace(-1, 1, 500), np.linspace(-1, 1, 500) * 1e-3])
    observer = PowerOfTwo(QScheme(signed=True, symmetric=True, axis=0))
    observer.observe(x)
    assert observer.qparams().scale.tolist() == [2.0**-7, 2.0**-17]


def test_nothing_but_zeros_and_the_smallest_numbers_have_a_scale():
    for values in ([0.0, 0.0], [1e-45, -1e-45], [1e-38]):
        observer = PowerOfTwo(QScheme(power_of_two=True))
        observer.observe(np.array(values))
        assert float(observer.qparams().scale) > 0
