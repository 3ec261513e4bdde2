"""The fake-quant kernel against float64 numpy and the LSQ paper's formula, eager and under jit.trace."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import numpy as np
import pytest
from megengine import amp
from megengine.autodiff import GradManager
from megengine.jit import trace

from qtrace.fakequant.kernels import Learn, Levels, quant_dequant
from qtrace.scheme import Rounding
from tests.each import each_of

ROUNDINGS: tuple[Rounding, ...] = ("half_even", "half_away", "half_up")

CASES = [
    # qmin, qmax, zero point, channel axis
    (-8, 7, 0, None),
    (0, 15, 3, None),
    (0, 255, 128, None),
    (0, 255, 0, None),
    (-127, 127, 0, 0),
    (0, 15, 5, 1),
    (-32768, 32767, 0, None),
]


def _parameters(zero: int, axis: int | None, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    if axis is None:
        return np.float32(0.113), np.float32(zero)
    form = tuple(n if i == axis else 1 for i, n in enumerate(shape))
    count = shape[axis]
    scale = np.linspace(0.05, 0.4, count, dtype=np.float32).reshape(form)
    zeros = (zero + np.arange(count) % 2 * (zero != 0)).astype(np.float32).reshape(form)
    return scale, zeros


def _reference(
    x: np.ndarray, s: np.ndarray, z: np.ndarray, qmin: int, qmax: int, rounding: Rounding
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Forward, dy/dx and dy/ds in float64, from the float32 quotient that a runtime rounds."""
    v = (x / s).astype(np.float64)
    away, up = np.sign(v) * np.floor(np.abs(v) + 0.5), np.floor(v + 0.5)
    q = np.clip(
        {"half_even": np.rint(v), "half_away": away, "half_up": up}[rounding], qmin - z, qmax - z
    ).astype(np.float64)
    inside = (v >= qmin - z) & (v <= qmax - z)
    return q * s.astype(np.float64), inside.astype(np.float64), np.where(inside, q - v, q)


def _data(shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=shape) * 1.5).astype(np.float32)
    x.reshape(-1)[:8] = [0.0, -0.0, 0.0565, -0.0565, 1e6, -1e6, 3e-39, 0.16949999]
    return x


@each_of("rounding", ROUNDINGS)
@each_of(("qmin", "qmax", "zero", "axis"), CASES)
@each_of("jit", [None, "static", "symbolic"])
def test_forward_and_gradients(
    qmin: int, qmax: int, zero: int, axis: int | None, rounding: Rounding, jit: str | None
) -> None:
    x = _data((6, 5, 7))
    s, z = _parameters(zero, axis, x.shape)
    upstream = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    y_ref, dx_ref, ds_ref = _reference(x, s, z, qmin, qmax, rounding)
    xt, st, zt, ut = mge.Parameter(x), mge.Parameter(s), mge.Tensor(z), mge.Tensor(upstream)
    manager = GradManager().attach([xt, st])
    gain = 0.37
    levels = Levels(qmin, qmax, rounding, None if np.ptp(z) else zero)

    def step() -> mge.Tensor:
        with manager:
            y = quant_dequant(xt, st, zt, levels, s.shape, Learn(gain))
            manager.backward((y * ut).sum())
        return y

    run = step if jit is None else trace(step, symbolic=jit == "symbolic")
    for _ in range(3 if jit else 1):
        xt.grad = st.grad = None
        y = run()
    np.testing.assert_allclose(y.numpy(), y_ref, rtol=1e-6, atol=0)
    np.testing.assert_array_equal(xt.grad.numpy(), (upstream * dx_ref).astype(np.float32))
    axes = tuple(i for i in range(x.ndim) if i != axis) if axis is not None else None
    want = (upstream * ds_ref).sum(axis=axes, keepdims=axis is not None) * gain
    tolerance = 1e-4 * float(np.abs(upstream * ds_ref).sum())
    assert np.abs(st.grad.numpy() - want).max() <= tolerance


def test_scale_gradient_matches_finite_differences_where_values_clip() -> None:
    """Clipped values are exactly linear in the scale, so a finite difference is the true derivative."""
    x = np.array([50.0, -50.0, 80.0], np.float32)
    zero, qmin, qmax, s, h = 3.0, 0, 15, 0.25, 0.0625

    def loss(scale: float) -> float:
        y = quant_dequant(
            mge.Tensor(x), mge.Tensor(np.float32(scale)), mge.Tensor(np.float32(zero)), Levels(qmin, qmax), ()
        )
        return float((y * mge.Tensor([1.0, 2.0, -0.5])).sum().numpy())

    st = mge.Parameter(np.float32(s))
    manager = GradManager().attach([st])
    with manager:
        y = quant_dequant(mge.Tensor(x), st, mge.Tensor(np.float32(zero)), Levels(qmin, qmax), (), Learn())
        manager.backward((y * mge.Tensor([1.0, 2.0, -0.5])).sum())
    assert float(st.grad.numpy()) == pytest.approx((loss(s + h) - loss(s - h)) / (2 * h), rel=1e-5)


def test_ties_round_as_asked_under_jit_at_its_default_level() -> None:
    edges = [np.nextafter(np.float32(0.5), np.float32(0)), -1e-30]
    x = mge.Tensor(np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, *edges], np.float32))
    one, zero = mge.Tensor(np.float32(1)), mge.Tensor(np.float32(0))
    want: dict[Rounding, list[int]] = {
        "half_even": [0, 2, 2, 0, -2, -2, 0, 0],
        "half_away": [1, 2, 3, -1, -2, -3, 0, 0],
        "half_up": [1, 2, 3, 0, -1, -2, 0, 0],
    }
    for rounding, integers in want.items():
        levels = Levels(-128, 127, rounding)
        run = trace(lambda v, levels=levels: quant_dequant(v, one, zero, levels, ()), symbolic=True)
        for _ in range(3):
            y = run(x)
        np.testing.assert_array_equal(y.numpy(), integers)


def test_no_scale_gradient_when_it_is_not_learned() -> None:
    st = mge.Parameter(np.float32(0.1))
    x = mge.Parameter(np.ones(3, np.float32))
    manager = GradManager().attach([st, x])
    with manager:
        y = quant_dequant(x, st, mge.Tensor(np.float32(0)), Levels(-8, 7), ())
        manager.backward(F.sum(y))
    assert st.grad is None or not np.any(st.grad.numpy())
    np.testing.assert_array_equal(x.grad.numpy(), np.zeros(3))


@each_of("form", ["tensor", "channels", "channels of one zero point"])
@each_of("scale", [1.0, 0.0371])
@each_of(("qmin", "qmax", "zero"), [(-8, 7, 0), (0, 15, 0), (0, 15, 15), (-128, 127, 0), (0, 65535, 30000)])
def test_gradient_passes_at_the_bounds_and_not_beyond(
    qmin: int, qmax: int, zero: int, scale: float, form: str
) -> None:
    s = np.float32(scale)
    low, high = np.float32(qmin - zero), np.float32(qmax - zero)
    inside = [low, high, np.nextafter(low, high), np.nextafter(high, low)]
    beyond = (qmax - qmin) * 3e-6
    outside = [low - beyond, high + beyond, np.float32(-np.inf), np.float32(np.inf)]
    shape = () if form == "tensor" else (1, 1)
    x = mge.Parameter((np.array([[*inside, *outside]], np.float32) * s).astype(np.float32))
    step, zero_point = mge.Parameter(np.full(shape, s)), mge.Tensor(np.full(shape, zero, np.float32))
    levels = Levels(qmin, qmax, zero=zero if form == "channels of one zero point" else None)
    with GradManager().attach([x, step]) as manager:
        y = quant_dequant(x, step, zero_point, levels, shape, Learn())
        manager.backward(y, mge.Tensor(np.full(x.shape, 3.0, np.float32)))
    np.testing.assert_array_equal(x.grad.numpy(), [[3.0] * len(inside) + [0.0] * len(outside)])
    assert np.isfinite(step.grad.numpy()).all()


@each_of("shape", [(2, 3, 1, 1, 1), (2, 1, 4, 1, 1), (1, 1, 4, 1, 1), (1, 1, 1, 1, 5)])
def test_scale_gradient_of_any_shape(shape: tuple[int, ...]) -> None:
    x = _data((2, 3, 4, 5, 5))
    upstream = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    s = np.linspace(0.05, 0.4, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    scale = mge.Parameter(s)
    with GradManager().attach([scale]) as manager:
        y = quant_dequant(mge.Tensor(x), scale, mge.Tensor(np.zeros_like(s)), Levels(-8, 7), shape, Learn())
        manager.backward(y, mge.Tensor(upstream))
    slope = upstream * _reference(x, s, np.zeros_like(s), -8, 7, "half_even")[2]
    want = slope.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)
    np.testing.assert_allclose(scale.grad.numpy(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axis", [None, 0])
def test_half_precision_is_rounded_as_float32(axis: int | None) -> None:
    half = _data((4, 6)).clip(-3, 3).astype(np.float16)
    s, z = _parameters(0, axis, half.shape)
    x, scale, zero = mge.Parameter(half), mge.Parameter(s), mge.Tensor(z)
    with amp.autocast(), GradManager().attach([x, scale]) as manager:
        y = quant_dequant(x, scale, zero, Levels(-8, 7), s.shape, Learn())
        manager.backward(y.sum())
    assert y.dtype == np.float32
    want, slope, _ = _reference(half.astype(np.float32), s, z, -8, 7, "half_even")
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-6)
    np.testing.assert_array_equal(x.grad.numpy(), slope)
    assert x.grad.dtype == np.float16


@pytest.mark.parametrize("shape", [(), (1, 3, 1, 1)])
def test_of_a_scale_the_magnitude_counts_and_its_gradient_has_the_sign(shape: tuple[int, ...]) -> None:
    x, upstream = _data((2, 3, 4, 4)), _data((2, 3, 4, 4))[::-1].copy()
    found = []
    for sign in (1, -1):
        scale = mge.Parameter(np.full(shape, sign * 0.07, np.float32))
        value = mge.Parameter(x)
        with GradManager().attach([value, scale]) as manager:
            y = quant_dequant(value, scale, None, Levels(-8, 7, zero=0), shape, Learn(0.5))
            manager.backward(y, mge.Tensor(upstream))
        found.append((y.numpy(), value.grad.numpy(), sign * scale.grad.numpy()))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.abs(found[0][2]).min() > 0


def test_a_scale_of_nothing_gives_no_nan() -> None:
    scale = mge.Parameter(np.zeros((), np.float32))
    with GradManager().attach([scale]) as manager:
        y = quant_dequant(mge.Tensor(_data((4, 4))), scale, None, Levels(-8, 7, zero=0), (), Learn())
        manager.backward(y.sum())
    assert np.isfinite(y.numpy()).all()
    assert scale.grad.numpy() == 0
