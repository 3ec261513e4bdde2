"""Small tensors in eager mode are computed in numpy: the bits of the programs, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator

import megengine as mge
import numpy as np
import pytest
from megengine.autodiff import GradManager
from megengine.jit import trace

from qtrace.fakequant import kernels
from qtrace.fakequant.following.bias import BIAS_QMAX
from qtrace.fakequant.kernels import Learn, Levels, quant_dequant
from qtrace.scheme import Rounding
from tests.each import each_of

SHAPE = (6, 5, 7)


@pytest.fixture(autouse=True)
def without_a_queue() -> Iterator[None]:
    before, mge.config.async_level = mge.config.async_level, 0
    yield
    mge.config.async_level = before


def _values() -> np.ndarray:
    x = (np.random.default_rng(0).normal(size=SHAPE) * 2).astype(np.float32)
    ends = np.array([0.0, -0.0, 1e6, -1e6, np.inf, -np.inf, 0.5, 1.5, -2.5, 3e-39, 0.1, -0.1], np.float32)
    x.reshape(-1)[: ends.size] = ends
    # At the ends of the range, and one step of float32 beyond.
    x.reshape(-1)[12:16] = [0.113 * 7, 0.113 * -8, np.nextafter(np.float32(0.113 * 7), 9), 0.113 * 7.4]
    return x


def _step(levels: Levels, scale: np.ndarray, zero: np.ndarray, learn: Learn | None) -> list[np.ndarray]:
    """Returns the result and the gradients of values and scale."""
    x, s, z = mge.Parameter(_values()), mge.Parameter(scale), mge.Parameter(zero)
    upstream = mge.Tensor(np.random.default_rng(1).normal(size=SHAPE).astype(np.float32))
    manager = GradManager().attach([x, s, z])
    with manager:
        y = quant_dequant(x, s, z, levels, scale.shape, learn)
        manager.backward(y, upstream)
    return [t.numpy() for t in (y, x.grad, s.grad, z.grad) if t is not None]


@each_of("learn", [None, Learn(0.37), Learn(residual=False), Learn(0.5, zero_point=True)])
@each_of("rounding", ["half_even", "half_away", "half_up"])
@each_of("zero", [None, 0, 3])
@each_of("channels", [False, True])
def test_arrays_give_what_the_programs_give(
    channels: bool, zero: int | None, rounding: Rounding, learn: Learn | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = Levels(-8, 7, rounding, zero)
    shape = (1, SHAPE[1], 1) if channels else ()
    scale = np.full(shape, 0.113, np.float32)
    scale.reshape(-1)[-1] *= -1  # a learned scale may cross zero
    zeros = np.full(shape, 2.0 if zero is None else zero, np.float32)
    calls = _count_rounds(monkeypatch)
    own = _step(levels, scale, zeros, learn)
    assert calls == [1]
    monkeypatch.setattr(kernels, "fits", lambda x: False)
    expected = _step(levels, scale, zeros, learn)
    assert calls == [1]
    assert len(own) == len(expected)
    np.testing.assert_array_equal(own[0].view(np.int32), expected[0].view(np.int32))
    np.testing.assert_array_equal(own[1], expected[1])
    for mine, other in zip(own[2:], expected[2:], strict=True):
        assert mine.shape == other.shape
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=1e-4)


def _count_rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls, before = [0], kernels.round_array

    def count(*arguments: np.ndarray | Levels) -> np.ndarray:
        calls[0] += 1
        return before(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "round_array", count)
    return calls


def test_biases_of_32_bits_are_rounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = Levels(-BIAS_QMAX, BIAS_QMAX, "half_away", 0)
    scale, zero = np.float32(1e-6), np.zeros((), np.float32)
    own = _step(levels, np.asarray(scale), zero, None)
    monkeypatch.setattr(kernels, "fits", lambda x: False)
    for mine, other in zip(own, _step(levels, np.asarray(scale), zero, None), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_values_without_a_gradient_get_none() -> None:
    x, s = mge.Tensor(_values()), mge.Parameter(np.float32(0.113))
    manager = GradManager().attach([s])
    with manager:
        y = quant_dequant(x, s, mge.Tensor(np.float32(0)), Levels(-8, 7, zero=0), (), Learn())
        manager.backward(y.sum())
    assert np.isfinite(s.grad.numpy()).all()
    saved = tuple(v.numpy() for v in (x, s, s, y))
    assert kernels.differentiate(saved, y.numpy(), Levels(-8, 7, zero=0), Learn(), of_x=False).x is None


def test_traces_queues_and_large_tensors_take_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _count_rounds(monkeypatch)
    one, zero = mge.Tensor(np.float32(0.5)), mge.Tensor(np.float32(0))

    def run(x: mge.Tensor) -> mge.Tensor:
        return quant_dequant(x, one, zero, Levels(-8, 7, zero=0), ())

    small = mge.Tensor(_values())
    run(mge.Tensor(np.ones((1 << 18) + 1, np.float32)))
    for symbolic in (True, False):
        traced = trace(run, symbolic=symbolic)
        for _ in range(3):
            traced(small)
    mge.config.async_level = 2
    run(small)
    assert calls == [0]
    mge.config.async_level = 0
    run(small)
    assert calls == [1]
