"""What each method learns, against finite differences of the relaxed form in float64.

Relaxed means: the distance to the rounded value stays what it is, so that only what the straight-through
estimator lets pass moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import megengine as mge
import numpy as np
import pytest
from megengine.autodiff import GradManager
from megengine.jit import trace

from qtrace import plugins
from qtrace.errors import ConfigError
from qtrace.fakequant.base import FakeQuant
from qtrace.numerics import fake_quantize
from qtrace.scheme import QParams, QScheme
from tests.each import each_of

PACKAGE = "qtrace.fakequant"
pytestmark = pytest.mark.usefixtures("synchronous")
Theta = dict[str, np.ndarray]


def _lsq(t: Theta, z: np.ndarray, scheme: QScheme) -> tuple[np.ndarray, np.ndarray]:
    return np.abs(t["scale"]), z


def _lsq_plus(t: Theta, z: np.ndarray, scheme: QScheme) -> tuple[np.ndarray, np.ndarray]:
    s = np.abs(t["scale"])
    return s, np.clip(-t["offset"] / s, scheme.qmin, scheme.qmax) if "offset" in t else z


def _learned_range(t: Theta, z: np.ndarray, scheme: QScheme) -> tuple[np.ndarray, np.ndarray]:
    if "low" not in t:
        return t["high"] / (scheme.qmax - scheme.symmetric_zero_point), z
    s = (t["high"] - t["low"]) / (scheme.qmax - scheme.qmin)
    return s, scheme.qmin - t["low"] / s


def _pact(t: Theta, z: np.ndarray, scheme: QScheme) -> tuple[np.ndarray, np.ndarray]:
    steps = scheme.qmax - z if scheme.symmetric else np.maximum(scheme.qmax - z, z - scheme.qmin)
    return t["bound"] / steps, z


def _tqt(t: Theta, z: np.ndarray, scheme: QScheme) -> tuple[np.ndarray, np.ndarray]:
    return 2.0 ** (t["log2_threshold"] - (scheme.bits - scheme.signed)), z


DERIVED = {"lsq": _lsq, "lsq_plus": _lsq_plus, "learned_range": _learned_range, "pact": _pact, "tqt": _tqt}
METHODS = [*DERIVED, "dorefa", "fixed"]


def _schemes() -> Iterator[QScheme]:
    for bits in (2, 4, 8, 16):
        yield QScheme(bits=bits)
        yield QScheme(bits=bits, signed=True, symmetric=True, axis=1)
    yield QScheme(bits=5, signed=True, axis=1)
    yield QScheme(bits=3, symmetric=True)


SHAPE = (6, 3, 40)


def make(name: str, scheme: QScheme, *, learned: bool = True, **options: Any) -> FakeQuant:
    """A calibrated fake quant in the phase train, away from where it began."""
    scheme = scheme.replace(power_of_two=name == "tqt")
    shape = (1, 3, 1) if scheme.per_channel else ()
    fake = plugins.resolve(PACKAGE, name, FakeQuant)("x", scheme, shape=shape, numel=40, **options)
    rng = np.random.default_rng(scheme.bits)
    size = shape or ()
    scale = rng.uniform(0.6, 1.2, size) * 4 / (scheme.qmax - scheme.qmin)
    if scheme.power_of_two:
        scale = 2.0 ** np.round(np.log2(scale))
    zero = np.full(size, scheme.symmetric_zero_point)
    if not scheme.symmetric:
        zero = np.round(scheme.qmin + rng.uniform(0.2, 0.6, size) * (scheme.qmax - scheme.qmin))
    flat = (-1,) if size else ()
    fake.set_qparams(QParams(scheme, scale.reshape(flat), zero.astype(np.int32).reshape(flat)))
    fake.phase = "train"
    for parameter in fake.parameters(recursive=False) if learned else ():
        parameter._reset(mge.Parameter(parameter.numpy() * np.float32(1.03)))
    return fake


def data() -> np.ndarray:
    return (np.random.default_rng(9).normal(size=SHAPE) * 1.7).astype(np.float32)


def gradients(
    fake: FakeQuant, x: np.ndarray, upstream: np.ndarray, jit: bool = False
) -> dict[str, np.ndarray]:
    given, weights = mge.Parameter(x), mge.Tensor(upstream)
    named = {"x": given, **dict(fake.named_parameters(recursive=False))}
    manager = GradManager().attach(list(named.values()))

    def step() -> mge.Tensor:
        with manager:
            y = fake(given)
            manager.backward((y * weights).sum())
        return y

    run = trace(step, symbolic=True) if jit else step
    for _ in range(2 if jit else 1):
        for parameter in named.values():
            parameter.grad = None
        y = run()
    return {"y": y.numpy(), **{n: p.grad.numpy() for n, p in named.items() if p.grad is not None}}


def relaxed(name: str, fake: FakeQuant, x: np.ndarray) -> tuple[Theta, Callable[[Theta], np.ndarray]]:
    """The relaxed forward pass as a function of what is learned, in float64."""
    scheme, zero = fake.scheme, fake.zero_point.numpy().astype(np.float64)
    at = {n: p.numpy().astype(np.float64) for n, p in fake.named_parameters(recursive=False)}
    s0, z0 = (a.numpy().astype(np.float64) for a in (fake.effective_scale(), fake.effective_zero_point()))
    s_now, z_now = DERIVED[name](at, zero, scheme)
    low, high = scheme.qmin - z0, scheme.qmax - z0
    v0 = (x / s0.astype(np.float32)).astype(np.float64)
    inside = np.clip(v0, low, high)
    residual = np.clip(np.rint(v0), low, high) - inside
    x64 = x.astype(np.float64)
    if name == "pact":
        residual = residual * 0

    def forward(theta: Theta) -> np.ndarray:
        s, z = DERIVED[name](theta, zero, scheme)
        s, z = s * (s0 / s_now), z + (z0 - z_now)
        return (np.clip(x64 / s, scheme.qmin - z, scheme.qmax - z) + residual) * s

    return at, forward


@each_of("scheme", list(_schemes()), ids=QScheme.describe)
@each_of("name", DERIVED)
def test_gradients_are_finite_differences_of_the_relaxed_form(name: str, scheme: QScheme) -> None:
    options = {"grad_scale": False} if name in ("lsq", "lsq_plus") else {}
    fake, x = make(name, scheme, **options), data()
    upstream = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    got = gradients(fake, x, upstream)
    params = fake.qparams()
    want = fake_quantize(x, params)
    np.testing.assert_allclose(got["y"], want, rtol=1e-5, atol=1e-6 * float(np.abs(want).max()))
    scale, zero = (a.numpy() for a in (fake.effective_scale(), fake.effective_zero_point()))
    v = x / scale
    mask = (v >= fake.scheme.qmin - zero) & (v <= fake.scheme.qmax - zero)
    np.testing.assert_array_equal(got["x"], upstream * mask)
    at, forward = relaxed(name, fake, x)
    assert at.keys() == got.keys() - {"x", "y"}
    for key, value in at.items():
        h = 1e-6 * np.maximum(np.abs(value), 1e-6)
        ends = [forward({**at, key: value + side * h}) for side in (1, -1)]
        # A value within h of an end is on both sides of it.
        slope = (ends[0] - ends[1]) / (2 * h) * upstream
        axes = (0, 2) if fake.shape else None
        want = slope.sum(axis=axes, keepdims=bool(fake.shape))
        assert np.abs(got[key] - want).max() <= 2e-4 * np.abs(slope).sum() + 1e-6, key


@each_of("name", METHODS)
def test_jit_gives_what_eager_gives(name: str) -> None:
    upstream = np.random.default_rng(2).normal(size=SHAPE).astype(np.float32)
    for scheme in (QScheme(bits=4), QScheme(bits=4, signed=True, symmetric=True, axis=1)):
        fake = make(name, scheme, static=name == "dorefa")
        eager, jit = (gradients(fake, data(), upstream, jit=jit) for jit in (False, True))
        assert eager.keys() == jit.keys()
        for key, value in eager.items():
            np.testing.assert_allclose(jit[key], value, rtol=1e-4, atol=1e-4 * np.abs(value).max())


@each_of("axis", [None, 1])
@each_of("bits", [2, 4, 8, 16])
def test_dorefa_weights_have_the_paper_s_form_and_gradient(bits: int, axis: int | None) -> None:
    scheme = QScheme(bits=bits, signed=True, symmetric=True, narrow=True, axis=axis)
    fake, w = make("dorefa", scheme, static=True), data() * 0.4
    upstream = np.random.default_rng(3).normal(size=SHAPE).astype(np.float32)
    got = gradients(fake, w, upstream)
    reach = fake.scale.numpy().astype(np.float64) * scheme.qmax
    axes = None if axis is None else (0, 2)

    def bent(values: np.ndarray) -> np.ndarray:
        t = np.tanh(values)
        return t / np.abs(t).max(axis=axes, keepdims=True) * reach

    w64 = w.astype(np.float64)
    step = reach / scheme.qmax
    assert np.abs(got["y"] - bent(w64)).max() <= np.max(step) * 0.5001 + 1e-5
    np.testing.assert_allclose(np.rint(got["y"] / step), got["y"] / step, atol=2e-2 if bits == 16 else 1e-4)
    assert np.abs(np.rint(got["y"] / step)).max() == scheme.qmax
    peaks = np.flatnonzero(np.isclose(np.abs(bent(w64)), reach).ravel())
    for index in [0, 17, 333, *peaks]:
        nudge = np.zeros(w64.size)
        nudge[index] = 1e-6
        ends = [float((bent(w64 + side * nudge.reshape(SHAPE)) * upstream).sum()) for side in (1, -1)]
        assert got["x"].ravel()[index] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-3, abs=1e-3)


def test_dorefa_activations_are_fixed_ones() -> None:
    upstream = np.ones(SHAPE, np.float32)
    got = [gradients(make(name, QScheme(bits=4)), data(), upstream) for name in ("dorefa", "fixed")]
    for key in ("x", "y"):
        np.testing.assert_array_equal(got[0][key], got[1][key])


def test_tqt_keeps_powers_of_two_and_its_scale_for_small_steps() -> None:
    fake = make("tqt", QScheme(bits=4, signed=True, symmetric=True), learned=False)
    before = float(fake.qparams().scale)
    for shift, factor in ((0.3, 1), (-0.3, 1), (0.8, 2), (-0.8, 0.5)):
        moved = make("tqt", QScheme(bits=4, signed=True, symmetric=True), learned=False)
        moved.log2_threshold._reset(mge.Parameter(moved.log2_threshold.numpy() + np.float32(shift)))
        assert float(moved.qparams().scale) == before * factor


def test_the_gain_of_lsq_is_an_option() -> None:
    upstream = np.random.default_rng(4).normal(size=SHAPE).astype(np.float32)
    for name in ("lsq", "lsq_plus"):
        plain, paper, own = (
            gradients(make(name, QScheme(bits=4), grad_scale=option), data(), upstream)
            for option in (False, True, 0.125)
        )
        for key in plain.keys() - {"x", "y"}:
            assert paper[key] == pytest.approx(plain[key] / np.sqrt(40 * 15), rel=1e-5)
            assert own[key] == pytest.approx(plain[key] * 0.125, rel=1e-5)


@each_of("name", METHODS)
def test_options_are_refused_when_unknown_or_impossible(name: str) -> None:
    cls = plugins.resolve(PACKAGE, name, FakeQuant)
    scheme = QScheme(power_of_two=name == "tqt")
    with pytest.raises(ConfigError, match=rf"^unknown key 'gradscale' in {name}; "):
        cls("x", scheme, gradscale=1)
    if name.startswith("lsq"):
        for value in (0, -1.0, "yes", None, float("nan"), float("inf")):
            with pytest.raises(ConfigError, match=rf"^{name}\.grad_scale: choose true .*, not "):
                cls("x", scheme, grad_scale=value)
    if name in ("dorefa", "fixed"):
        return
    with pytest.raises(ConfigError, match=rf"^conv: {name} learns .*, but "):
        cls("conv", scheme.replace(power_of_two=name != "tqt"))
