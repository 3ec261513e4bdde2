from __future__ import annotations

import numpy as np
import pytest

from qtrace.numerics import fake_quantize, grid
from qtrace.observers.mse import MeanSquaredError
from qtrace.observers.silu_mse import SiluMeanSquaredError
from qtrace.scheme import QParams, QScheme

SCHEME = QScheme(bits=8, signed=False, symmetric=False)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def behind(x: np.ndarray, lo: float, hi: float, scheme: QScheme) -> float:
    """The squared error of the function of the quantized values."""
    return float(np.mean((silu(fake_quantize(x, QParams(scheme, *grid(lo, hi, scheme)))) - silu(x)) ** 2))


def ranges(x: np.ndarray, scheme: QScheme) -> list[tuple[float, float]]:
    found = []
    for kind in (MeanSquaredError, SiluMeanSquaredError):
        observer = kind(scheme)
        observer.observe(x.astype(np.float32))
        found.append(tuple(float(end) for end in observer.range()))
    return found


@pytest.mark.parametrize("scheme", [SCHEME, SCHEME.replace(bits=4), QScheme(bits=8)], ids=QScheme.describe)
@pytest.mark.parametrize(("spread", "shift"), [(3.0, 0.0), (6.0, -4.0), (0.5, 0.2)])
def test_is_as_good_as_brute_force_behind_the_function(scheme, spread, shift):
    x = np.random.RandomState(0).normal(shift, spread, 20_000).astype(np.float32).astype(np.float64)
    lo, hi = min(x.min(), 0.0), max(x.max(), 0.0)
    ratios = np.exp2(-np.arange(48) / 8)
    pairs = [(r, r) for r in ratios] if scheme.symmetric else [(a, b) for a in ratios for b in ratios[:24:2]]
    best = min(behind(x, lo * a, hi * b, scheme) for a, b in pairs)
    plain, found = ranges(x, scheme)
    assert behind(x, *found, scheme) <= 1.05 * best
    assert behind(x, *found, scheme) <= 1.02 * behind(x, *plain, scheme)


def test_what_the_function_takes_to_nearly_nothing_is_clipped():
    x = np.random.RandomState(0).normal(-4.0, 6.0, 20_000)
    plain, found = ranges(x, SCHEME)
    assert plain[0] < -15
    assert -9 < found[0] < -4
    assert behind(x, *found, SCHEME) < 0.5 * behind(x, *plain, SCHEME)


def test_nothing_but_zeros_keeps_its_range():
    observer = SiluMeanSquaredError(SCHEME)
    observer.observe(np.zeros(5))
    assert observer.range() == (0.0, 0.0)
