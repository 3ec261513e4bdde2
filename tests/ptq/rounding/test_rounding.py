"""The mathematics of learned rounding, against formulas and finite differences in float64."""

from __future__ import annotations

import numpy as np
import pytest

from qtrace.learning import Adam
from qtrace.numerics import dequantize, fake_quantize, quantize
from qtrace.ptq.rounding.block_run import SoftRounding, anneal
from qtrace.scheme import QParams, QScheme


def _soft(seed: int = 0, size: int = 60) -> SoftRounding:
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(4, size // 4))
    scale = rng.uniform(0.1, 0.5, (4, 1))
    return SoftRounding(weight, scale, np.zeros((4, 1)), (-8, 7))


def test_soft_rounding_starts_at_the_weight() -> None:
    rng = np.random.default_rng(1)
    weight = rng.uniform(-1, 1, (4, 9))
    soft = SoftRounding(weight, np.full((4, 1), 0.2), np.zeros((4, 1)), (-8, 7))
    np.testing.assert_allclose(soft.soft(), weight, atol=1e-12)


def test_h_is_the_rectified_sigmoid() -> None:
    soft = _soft()
    soft.v[0, :3] = (-9.0, 0.0, 9.0)
    expected = np.clip(1.2 / (1 + np.exp(-soft.v)) - 0.1, 0, 1)
    np.testing.assert_allclose(soft.up(), expected)
    assert (soft.up()[0, 0], soft.up()[0, 2]) == (0.0, 1.0)


@pytest.mark.parametrize("strength", [0.0, 0.3])
def test_the_gradient_is_that_of_finite_differences(strength: float) -> None:
    soft, beta = _soft(), 4.0
    target = np.random.default_rng(2).normal(size=soft.v.shape)

    def loss() -> float:
        regularizer = np.sum(1.0 - np.abs(2.0 * soft.up() - 1.0) ** beta)
        return float(np.sum((soft.soft() - target) ** 2)) + strength * float(regularizer)

    gradient = soft.gradient(2 * (soft.soft() - target), beta, strength)
    numeric = np.zeros_like(gradient)
    for index in np.ndindex(*soft.v.shape):
        old = soft.v[index]
        soft.v[index] = old + 1e-6
        high = loss()
        soft.v[index] = old - 1e-6
        numeric[index] = (high - loss()) / 2e-6
        soft.v[index] = old
    np.testing.assert_allclose(gradient, numeric, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "scheme",
    [QScheme(4, signed=True, symmetric=True, axis=0), QScheme(4, signed=False, symmetric=False, axis=0)],
)
def test_a_decided_weight_is_what_the_fake_quant_and_an_export_make_of_it(scheme: QScheme) -> None:
    rng = np.random.default_rng(3)
    weight = rng.normal(size=(6, 40)).astype(np.float32)
    zero = np.full(6, scheme.symmetric_zero_point if scheme.symmetric else 7, np.int32)
    qparams = QParams(scheme, rng.uniform(0.05, 0.4, 6).astype(np.float32), zero)
    soft = SoftRounding(
        weight,
        qparams.scale[:, None],
        zero[:, None].astype(np.float32),
        (scheme.qmin, scheme.qmax),
    )
    soft.v += rng.normal(size=soft.v.shape).astype(np.float32) * 5
    hard = soft.hard()
    np.testing.assert_array_equal(fake_quantize(hard, qparams), hard)
    integers = quantize(hard, qparams)
    np.testing.assert_array_equal(dequantize(integers, qparams), hard)
    floor = np.floor(weight / qparams.scale[:, None]) + zero[:, None]
    inside = (floor >= scheme.qmin) & (floor < scheme.qmax)
    assert set(np.unique((integers - floor)[inside])) == {0, 1}


def test_the_exponent_falls_along_a_cosine_after_the_warmup() -> None:
    assert anneal(0.1, 0.2, (20, 2)) is None
    assert anneal(0.2, 0.2, (20, 2)) == pytest.approx(20)
    assert anneal(0.6, 0.2, (20, 2)) == pytest.approx(11)
    assert anneal(1.0, 0.2, (20, 2)) == pytest.approx(2)


def test_rounding_a_layer_for_its_output_beats_rounding_to_nearest() -> None:
    """Least squares on correlated inputs, in float64 without MegEngine: the point of the method."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(300, 12)) @ rng.normal(size=(12, 12))
    weight = rng.normal(size=(5, 12))
    soft = SoftRounding(weight, np.full((5, 1), 0.5), np.zeros((5, 1)), (-8, 7))
    nearest = np.clip(np.rint(weight / 0.5), -8, 7) * 0.5
    unit = float(np.mean((x @ (nearest - weight).T) ** 2))
    adam = Adam(soft.v, 0.02)
    for step in range(600):
        error = x @ (soft.soft() - weight).T
        beta = anneal(step / 600, 0.2, (20, 2))
        of_weight = 2 * error.T @ x / (error.size * unit)
        adam.step(soft.gradient(of_weight, beta or 2.0, 0.0 if beta is None else 0.01))
    assert np.mean((x @ (soft.hard() - weight).T) ** 2) < 0.85 * unit


def test_roundings_that_are_known_are_where_it_starts_and_can_still_learn() -> None:
    soft = _soft()
    hard = (soft.low + np.random.default_rng(5).integers(0, 2, soft.low.shape)) * soft.scale
    soft.lean_to(hard)
    np.testing.assert_allclose(soft.hard(), np.clip(hard, -8 * soft.scale, 7 * soft.scale))
    assert set(np.round(soft.up().ravel(), 6)) == {0.2, 0.8}
    assert np.all(soft.gradient(np.ones_like(hard), 2.0, 0.0)[np.abs(soft.low) < 7] > 0)
