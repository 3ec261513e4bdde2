from __future__ import annotations

import numpy as np
import pytest

from qtrace.numerics import choose, grid
from qtrace.observers.minmax import MinMax
from qtrace.observers.mse import MeanSquaredError
from qtrace.observers.statistics import error, tables
from qtrace.scheme import QScheme
from tests.each import each_of

RNG = np.random.default_rng(7)
N = 4000


def _with_outliers() -> np.ndarray:
    x = RNG.normal(size=N)
    x[:3] = [60, -20, 35]
    return x


GAUSS = RNG.normal(size=N)
DATA = {
    "gauss": GAUSS,
    "laplace": RNG.laplace(size=N),
    "relu": np.maximum(GAUSS, 0),
    "sparse": np.maximum(GAUSS - 1.28, 0),
    "uniform": RNG.uniform(-1, 1, N),
    "outliers": _with_outliers(),
    "silu": 2 * GAUSS / (1 + np.exp(-2 * GAUSS)),
    "skewed": np.exp(GAUSS) - 0.3,
}
SCHEMES = [
    QScheme(),
    QScheme(bits=4),
    QScheme(signed=True, symmetric=True, narrow=True),
    QScheme(bits=4, signed=True, symmetric=True),
    QScheme(power_of_two=True),
]


def true_error(x, scale, zero_point, scheme):
    """The mean squared error in plain float64, for K quantizers of K scales and zero points."""
    scale, zero_point = (np.asarray(a, np.float64)[:, None] for a in (scale, zero_point))
    q = np.clip(np.rint(x / scale) + zero_point, scheme.qmin, scheme.qmax)
    return np.mean(((q - zero_point) * scale - x) ** 2, axis=1)


def brute_force(x, scheme):
    """The least mean squared error that a fine search of both ends finds on the data themselves."""
    full = best = (min(x.min(), 0.0), max(x.max(), 0.0))
    one_sided = scheme.symmetric or full[0] == 0
    least = np.inf
    for octaves, count in ((None, 48), (0.2, 15), (0.03, 15)):
        ratios = np.exp2(-np.arange(count) / 6 if octaves is None else np.linspace(-octaves, octaves, count))
        if one_sided:
            ratios = np.exp2(
                np.interp(np.linspace(0, 1, 8 * count), np.linspace(0, 1, count), np.log2(ratios))
            )
        a, b = (ratios, ratios) if one_sided else map(np.ravel, np.meshgrid(ratios, ratios))
        lo, hi = np.maximum(best[0] * a, full[0]), np.minimum(best[1] * b, full[1])
        scale, zero_point = grid(lo, hi, scheme)
        parts = [slice(i, i + 64) for i in range(0, len(scale), 64)]
        errors = np.concatenate([true_error(x, scale[p], zero_point[p], scheme) for p in parts])
        at = np.argmin(errors)
        if errors[at] < least:
            least, best = errors[at], (lo[at], hi[at])
    return least


@each_of("name", DATA)
@each_of("scheme", SCHEMES, ids=QScheme.describe)
def test_is_as_good_as_brute_force_on_the_data(scheme, name):
    x = DATA[name].astype(np.float32).astype(np.float64)
    observer = MeanSquaredError(scheme)
    observer.observe(x)
    params = observer.qparams()
    ours = true_error(x, [params.scale], [params.zero_point], scheme)[0]
    assert ours <= brute_force(x, scheme) * 1.02


def spread(state, points):
    """The measure of the histogram as `points` equal weights in each bin, and zeros apart: x, weight."""
    width, counts = 2.0 ** float(state["exponent"][0]), state["counts"][0].astype(np.float64)
    origin = int(np.floor(min(float(state["lo"][0]), 0) / width))
    counts[-origin] -= state["zeros"][0]
    x = (origin + (np.arange(counts.size * points) + 0.5) / points) * width
    return x, np.repeat(counts / points, points)


@each_of("name", ["gauss", "sparse", "outliers", "silu"])
@each_of("scheme", [*SCHEMES, QScheme(bits=2), QScheme(bits=10)], ids=QScheme.describe)
def test_closed_form_is_the_integral_over_the_histogram(scheme, name):
    observer = MeanSquaredError(scheme, bins=128)
    observer.observe(DATA[name])
    state = observer.state_dict()
    lo, hi = min(float(state["lo"][0]), 0.0), max(float(state["hi"][0]), 0.0)
    los, his = np.array([[1.0, 0.7, 0.2, 1.0, 0.05]]) * lo, np.array([[1.0, 0.7, 0.2, 0.1, 0.05]]) * hi
    scale, zero_point = (a[0].astype(np.float64)[:, None] for a in grid(los, his, scheme))
    x, weight = spread(state, 400)
    q = np.clip(np.rint(x / scale) + zero_point, scheme.qmin, scheme.qmax)
    integral = np.sum(weight * ((q - zero_point) * scale - x) ** 2, axis=1)
    width = 2.0 ** float(state["exponent"][0])
    assert error(tables(state), los, his, scheme)[0] * width**2 == pytest.approx(integral, rel=1e-3)


@each_of("scheme", [QScheme(bits=8), QScheme(bits=12), QScheme(bits=16)], ids=QScheme.describe)
def test_closed_form_is_near_the_error_on_the_data(scheme):
    # For 12 and 16 bits that is uniform noise inside and clipping outside.
    x = np.random.default_rng(1).normal(size=100_000).astype(np.float32).astype(np.float64)
    observer = MeanSquaredError(scheme)
    observer.observe(x)
    state = observer.state_dict()
    los, his = np.array([[1.0, 0.8, 0.6, 0.3]]) * x.min(), np.array([[1.0, 0.8, 0.6, 0.5]]) * x.max()
    scale, zero_point = grid(los[0], his[0], scheme)
    model = error(tables(state), los, his, scheme)[0] * 4.0 ** float(state["exponent"][0]) / x.size
    # At 16 bits it shows that the outermost bins are thought full, though the data end within.
    assert model == pytest.approx(true_error(x, scale, zero_point, scheme), rel=0.05)


def test_sixteen_bits_clip_nothing():
    observer, minmax = (cls(QScheme(bits=16)) for cls in (MeanSquaredError, MinMax))
    for each in (observer, minmax):
        each.observe(DATA["laplace"])
    assert np.allclose(observer.range(), minmax.range(), rtol=0.02)


def test_range_gives_the_grid_that_was_judged():
    observer = MeanSquaredError(QScheme(bits=4))
    observer.observe(DATA["silu"])
    lo, hi = observer.range()
    scale, zero_point = grid(lo, hi, observer.scheme)
    assert (choose(lo, hi, observer.scheme).scale, observer.qparams().zero_point) == (scale, zero_point)


def test_constants_and_zeros():
    for value in (0.0, 3.7, -0.2, 1e-12, 3e38):
        observer = MeanSquaredError(QScheme())
        observer.observe(np.full(100, value, np.float32))
        params = observer.qparams()
        x = np.array([value], np.float32).astype(np.float64)
        step = float(params.scale)
        assert true_error(x, [params.scale], [params.zero_point], params.scheme)[0] <= step**2 / 4
        assert step <= (abs(value) or 1.0) / 255 * 1.001


def test_channels_are_searched_each_by_itself():
    rng = np.random.default_rng(5)
    weight = rng.normal(size=(40, 300)) * np.exp(rng.normal(size=(40, 1)))
    weight[3] = 0
    scheme = QScheme(bits=4, signed=True, symmetric=True, axis=0)
    observer = MeanSquaredError(scheme)
    observer.observe(weight)
    lo, hi = observer.range()
    for c in range(40):
        alone = MeanSquaredError(scheme.replace(axis=None))
        alone.observe(weight[c])
        assert alone.range() == (lo[c], hi[c])
