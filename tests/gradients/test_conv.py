"""conv2d: the bits of F.conv2d, and its gradients beside MegEngine's and beside differences in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megengine import Parameter, Tensor
from megengine.autodiff import GradManager
from megengine.jit import trace

from qtrace.gradients import _kernels, conv, conv2d
from tests.each import each_of

pytestmark = pytest.mark.usefixtures("synchronous")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of our kernels ran."""
    found: list[str] = []

    def spy(name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: found.append(name) or kernel(*args)  # type: ignore[func-returns-value]

    for name in ("to_input", "to_weight"):
        monkeypatch.setattr(conv, name, spy(name, getattr(conv, name)))
    return found


def _random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def _run(function: Callable[..., Tensor], values: tuple[np.ndarray, ...], dy: Any, **options: Any) -> Any:
    """The output and the gradients of input, weight and, if there is one, bias."""
    inputs = [Parameter(v) for v in values]
    with GradManager().attach(inputs) as manager:
        y = function(*inputs, **options)
        manager.backward(y, Tensor(_random(*y.shape, seed=9) if dy is None else dy))
    return [y.numpy(), *(p.grad.numpy() for p in inputs)]


def _assert_same(got: Any, want: Any) -> None:
    """Bits forward; backward what the order of summation leaves."""
    np.testing.assert_array_equal(got[0], want[0])
    for a, b in zip(got[1:], want[1:], strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 1e-3)


def _conv64(
    x: np.ndarray, w: np.ndarray, stride: Any, padding: Any, dilation: Any, groups: int
) -> np.ndarray:
    """The definition, tap by tap, in float64."""
    w = w.reshape(groups, -1, *w.shape[-3:]).astype(np.float64)
    (ph, pw), (sh, sw), (dh, dw) = padding, stride, dilation
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    oh = (x.shape[2] - dh * (w.shape[3] - 1) - 1) // sh + 1
    ow = (x.shape[3] - dw * (w.shape[4] - 1) - 1) // sw + 1
    x = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    y = np.zeros((x.shape[0], groups, w.shape[1], oh, ow))
    for i in range(w.shape[3]):
        for j in range(w.shape[4]):
            seen = x[..., i * dh : i * dh + (oh - 1) * sh + 1 : sh, j * dw : j * dw + (ow - 1) * sw + 1 : sw]
            y += np.einsum("gkc,ngcyx->ngkyx", w[..., i, j], seen)
    return y.reshape(x.shape[0], -1, oh, ow)


@settings(max_examples=30)
@given(
    groups=st.sampled_from([1, 1, 2, 3]),
    sizes=st.tuples(*[st.integers(1, 3)] * 3),
    image=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    room=st.sampled_from([1 << 22, 1]),
)
def test_gradients_of_any_geometry(groups, sizes, image, kernel, stride, padding, dilation, room):
    spans = [i + 2 * p - d * (k - 1) for i, p, d, k in zip(image, padding, dilation, kernel, strict=True)]
    assume(min(spans) >= 1)
    images, inputs, outputs = sizes
    x = _random(images, groups * inputs, *image)
    shape = (outputs, inputs, *kernel) if groups == 1 else (groups, outputs, inputs, *kernel)
    w = _random(*shape, seed=1)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernels, "_WINDOW_NUMBERS", room)  # 1: an image at a time
        got = _run(conv2d, (x, w), None, **options)
    _assert_same(got, _run(F.conv2d, (x, w), None, **options))

    # sum(y * dy) is linear in each of x and w: its differences are its derivatives, whatever the step.
    dy = _random(*got[0].shape, seed=9).astype(np.float64)
    random = np.random.RandomState(2)
    for position, gradient in enumerate(got[1:]):
        scale = max(np.abs(gradient).max(), 1e-3)
        for _ in range(3):
            where = tuple(random.randint(n) for n in gradient.shape)
            ends = []
            for step in (0.5, -0.5):
                moved = [x.astype(np.float64), w.astype(np.float64)]
                moved[position][where] += step
                ends.append((_conv64(*moved, stride, padding, dilation, groups) * dy).sum())
            assert abs((ends[0] - ends[1]) - gradient[where]) <= 1e-5 * scale


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_bias_and_default_arguments(groups, calls):
    w = _random(8, 8, 3, 3) if groups == 1 else _random(groups, 8 // groups, 8 // groups, 3, 3)
    values = (_random(2, 8, 6, 6), w, _random(1, 8, 1, 1, seed=3))
    got = _run(lambda x, w, b: conv2d(x, w, b, 1, 1, 1, groups), values, None)
    assert calls == ["to_input", "to_weight"]
    _assert_same(got, _run(lambda x, w, b: F.conv2d(x, w, b, 1, 1, 1, groups), values, None))


def test_signature_is_that_of_megengine():
    def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert parameters(conv2d) == parameters(F.conv2d)


@pytest.mark.parametrize("level", [0, 2])
def test_async_levels(level):
    values = (_random(4, 8, 12, 12), _random(8, 8, 3, 3))
    want = _run(conv2d, values, None, padding=1)
    before, mge.config.async_level = mge.config.async_level, level
    try:
        for _ in range(5):
            for a, b in zip(_run(conv2d, values, None, padding=1), want, strict=True):
                np.testing.assert_array_equal(a, b)
    finally:
        mge.config.async_level = before


@each_of("symbolic", [False, True])
@each_of("groups", [1, 2])
def test_a_trace_serves_other_batches_and_images(symbolic, groups):
    w = Parameter(_random(4, 4, 3, 3) if groups == 1 else _random(2, 2, 2, 3, 3))
    manager = GradManager().attach([w])

    def step(x: Tensor, function: Callable[..., Tensor]) -> Tensor:
        with manager:
            y = function(x, w, stride=2, padding=1, groups=groups)
            manager.backward((y * y).sum())
        return y

    traced = trace(lambda x: step(x, conv2d), symbolic=symbolic)
    for shape in ((2, 4, 9, 9), (2, 4, 9, 9), (3, 4, 9, 9), (1, 4, 7, 12), (1, 4, 12, 7)):
        x = Tensor(_random(*shape))
        w.grad = None
        got = [traced(x).numpy(), w.grad.numpy()]
        w.grad = None
        _assert_same(got, [step(x, F.conv2d).numpy(), w.grad.numpy()])


def test_only_gradients_that_are_wanted_are_computed(calls):
    x, w = Tensor(_random(2, 3, 8, 8)), Parameter(_random(4, 3, 3, 3))
    with GradManager().attach([w]) as manager:
        manager.backward(conv2d(x, w).sum())
    assert calls == ["to_weight"]
    calls.clear()
    x, w = Parameter(x), Tensor(w)
    with GradManager().attach([x]) as manager:
        manager.backward(conv2d(x, w).sum())
    assert x.grad is not None
    assert calls == []
    conv2d(x, w)
    assert calls == []


@pytest.mark.parametrize("stride", [1, 2])
def test_the_input_of_a_fixed_weight_with_groups(stride, calls):
    x, w = Parameter(_random(2, 8, 9, 9)), Tensor(_random(8, 1, 1, 3, 3))
    gradients = []
    for function in (conv2d, F.conv2d):
        x.grad = None
        with GradManager().attach([x]) as manager:
            y = function(x, w, None, stride, 1, 1, 8)
            manager.backward(y, Tensor(_random(*y.shape, seed=9)))
        gradients.append(x.grad.numpy())
    assert calls == ["to_input"] * (stride == 1)
    assert np.abs(gradients[0] - gradients[1]).max() <= 1e-5 * np.abs(gradients[1]).max()


def test_megengine_computes_what_is_small_or_not_on_a_cpu(calls, monkeypatch):
    values = (_random(2, 3, 8, 8), _random(4, 3, 3, 3))
    with monkeypatch.context() as patch:
        patch.setattr(conv, "CPUS", ("nothing",))
        got = _run(conv2d, values, None)
    with monkeypatch.context() as patch:
        patch.setattr(conv, "MIN_MULTIPLICATIONS", 200_000)
        _assert_same(_run(conv2d, values, None), got)
    assert calls == []


def test_float16_gradients_are_computed_by_megengine(calls):
    x, w = (Tensor(v.astype(np.float16)) for v in (_random(2, 3, 8, 8), _random(4, 3, 3, 3)))
    with GradManager().attach([w]) as manager:
        y = conv2d(x, w)
        manager.backward(y.sum())
    assert y.dtype == np.float16
    assert w.grad is not None
    assert calls == []


def test_gradients_add_up_over_calls():
    values = (_random(2, 3, 8, 8), _random(4, 3, 3, 3))
    single = _run(conv2d, values, None)
    w = Parameter(values[1])
    manager = GradManager().attach([w])
    for _ in range(2):
        with manager:
            y = conv2d(Tensor(values[0]), w)
            manager.backward(y, Tensor(_random(*y.shape, seed=9)))
    np.testing.assert_allclose(w.grad.numpy(), 2 * single[2], rtol=1e-6)
