"""Channels and tensors that are dead, as trained networks have them: weights of 1e-33, values next to 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager

import qtrace
from qtrace import QScheme
from qtrace.config.recipe import load_recipe
from qtrace.extras.finetune import FinetuneSettings, finetune
from qtrace.graph.types import TracedModule
from qtrace.numerics import SMALLEST_SCALE, SMALLEST_SHARE
from qtrace.observers.base import Observer
from qtrace.plugins import known, resolve
from qtrace.preparation.model import fake_quants
from qtrace.sensitivity import analyze
from tests.each import each_of
from tests.nets import images, net

BATCHES = [images(2, 3, 8, 8, seed=s) for s in range(3)]
X = mge.Tensor(BATCHES[0])
OBSERVERS = [n for n in known("qtrace.observers") if n != "silu_mse"]


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """Arithmetic on dead channels divides by nothing and takes no mean of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def _dead_channel(size: float = 1e-33, bias: bool = True) -> M.Module:
    """A 1x1 conv with a dead channel, one of zeros and a small one; the dead one may have a bias."""
    first = M.Conv2d(3, 8, 1, bias=bias)
    module = net(lambda self, x: self.d(F.relu(self.c(x))), c=first, d=M.Conv2d(8, 4, 3))
    weight = module.c.weight.numpy().copy()
    weight[1], weight[2] = size, 0.0
    weight[3] *= 0.05
    module.c.weight[...] = mge.Tensor(weight)
    if bias:
        module.c.bias[...] = mge.Tensor(np.linspace(-1, 1, 8).astype(np.float32).reshape(1, 8, 1, 1) + 0.5)
    return module


def _dead_tensor(size: float = 1e-33) -> M.Module:
    """A 1x1 conv that is dead as a whole, and layers with biases behind it."""
    module = net(
        lambda self, x: self.d(F.relu(self.e(self.c(x)))),
        c=M.Conv2d(3, 8, 1, bias=False),
        e=M.Conv2d(8, 8, 1),
        d=M.Conv2d(8, 4, 3),
    )
    module.c.weight[...] = mge.Tensor(np.full((8, 3, 1, 1), size, np.float32))
    module.e.bias[...] = mge.Tensor(np.linspace(-1, 1, 8).astype(np.float32).reshape(1, 8, 1, 1))
    return module


NETS: dict[str, Callable[[], M.Module]] = {
    "channel": _dead_channel,
    "no bias": lambda: _dead_channel(bias=False),
    "subnormal": lambda: _dead_channel(1e-42),
    "tensor": _dead_tensor,
    "zeros": lambda: _dead_tensor(0.0),
}


def _calibrated(module: M.Module, config: Any = None) -> TracedModule:
    module.eval()
    prepared = qtrace.prepare(qtrace.trace(module, BATCHES[0], check=False), config)
    return qtrace.calibrate(prepared, BATCHES, progress=False)


def _sqnr(module: M.Module, prepared: TracedModule) -> float:
    reference, output = module(X).numpy(), prepared(X).numpy()
    return float(10 * np.log10(np.sum(reference**2) / np.sum((reference - output) ** 2)))


# -- scales --------------------------------------------------------------------------------------------


@each_of("name", OBSERVERS)
@each_of("scheme", [QScheme(axis=0), QScheme(signed=True, symmetric=True, axis=0)])
def test_every_observer_widens_the_range_of_a_dead_channel_and_merges(name: str, scheme: QScheme) -> None:
    cls = resolve("qtrace.observers", name, Observer)
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(5, 300)).astype(np.float32) for _ in range(4)]
    for batch in batches:
        batch[1] *= np.float32(1e-33)
        batch[2] = 0
    whole, first, second = cls(scheme), cls(scheme), cls(scheme)
    for index, batch in enumerate(batches):
        whole.observe(batch, batch=index)
        (first if index % 2 else second).observe(batch, batch=index)
    params = whole.qparams()
    assert first.merge(second).qparams() == params == second.merge(first).qparams()
    share = params.scale[1] / np.delete(params.scale, [1, 2]).max()
    assert SMALLEST_SHARE * 0.5 <= share <= SMALLEST_SHARE * 2.0
    without = cls(scheme)
    for index, batch in enumerate(batches):
        without.observe(np.delete(batch, 1, axis=0), batch=index)
    np.testing.assert_array_equal(np.delete(params.scale, 1), without.qparams().scale)


@each_of("name", OBSERVERS)
@each_of("size", [1e-45, 1e-33])
def test_every_observer_takes_a_dead_tensor_for_zeros(name: str, size: float) -> None:
    cls, scheme = resolve("qtrace.observers", name, Observer), QScheme(power_of_two=name == "power_of_two")
    dead, zeros = cls(scheme), cls(scheme)
    dead.observe(np.linspace(0, size, 100))
    zeros.observe(np.zeros(100))
    assert dead.qparams().scale == zeros.qparams().scale


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", NETS)
def test_calibration_of_dead_parts_is_exact_enough(kind: str) -> None:
    module = NETS[kind]()
    prepared = _calibrated(module)
    scales = np.concatenate([fq.qparams().scale.reshape(-1) for fq in fake_quants(prepared)])
    assert scales.min() > 1e-12
    assert scales.max() < 1.0
    assert _sqnr(module, prepared) > 35
    np.testing.assert_array_equal(qtrace.convert(prepared)(X).numpy(), prepared(X).numpy())


# -- learned scales ------------------------------------------------------------------------------------


@pytest.mark.quick(3)
@pytest.mark.usefixtures("synchronous")
@pytest.mark.parametrize("kind", ["channel", "no bias", "tensor"])
@pytest.mark.parametrize("fakequant", known("qtrace.fakequant"))
def test_every_fake_quant_has_gradients_of_ordinary_size(fakequant: str, kind: str) -> None:
    config: dict[str, Any] = {
        "backend": "generic",
        "observers": {"weight": "minmax"},
        "qat": {"fakequant": fakequant},
    }
    if fakequant == "tqt":
        config |= {"weight": {"power_of_two": True}, "activation": {"power_of_two": True}}
    prepared = _calibrated(NETS[kind](), config)
    qtrace.set_phase(prepared, "train")
    parameters = list(prepared.parameters())
    manager = GradManager().attach(parameters)
    with manager:
        manager.backward((prepared(X) ** 2).mean())
    largest = [np.abs(p.grad.numpy()).max() for p in parameters if p.grad is not None]
    assert np.max(largest) < 1e3


@pytest.mark.usefixtures("synchronous")
def test_a_norm_that_trains_may_have_a_dead_channel() -> None:
    module = net(lambda self, x: self.n(self.c(x)), c=M.Conv2d(3, 4, 1), n=M.BatchNorm2d(4))
    gain = module.n.weight.numpy().copy()
    gain.reshape(-1)[1] = 1e-33
    module.n.weight[...] = mge.Tensor(gain)
    module.n.bias[...] = mge.Tensor(np.zeros_like(gain))
    prepared = _calibrated(module, {"qat": {"fakequant": "lsq", "bn": {"fold": False}}})
    converted = qtrace.convert(prepared)
    np.testing.assert_array_equal(converted(X).numpy(), prepared(X).numpy())
    scale = next(fq for fq in fake_quants(converted) if fq.site == "c_weight").qparams().scale
    assert SMALLEST_SHARE * 0.99 <= scale[1] / scale.max() <= SMALLEST_SHARE * 1.01


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["channel", "no bias", "tensor"])
@pytest.mark.parametrize("jit", [False, True])
def test_fine_tuning_with_learned_scales_takes_its_steps(kind: str, jit: bool) -> None:
    prepared = _calibrated(NETS[kind](), {"qat": {"fakequant": "lsq"}})
    finetune(prepared, BATCHES, FinetuneSettings(steps=2, batch_size=2, jit=jit), progress=False)
    assert np.isfinite(prepared(X).numpy()).all()


def test_scales_below_the_smallest_are_raised_where_they_are_set() -> None:
    prepared = _calibrated(_dead_channel())
    fq = next(fq for fq in fake_quants(prepared) if fq.site == "x")
    fq.set_qparams(type(fq.qparams())(fq.scheme, np.float32(1e-35), fq.qparams().zero_point))
    assert float(fq.qparams().scale) == SMALLEST_SCALE


# -- what works with calibrated graphs -----------------------------------------------------------------


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "algorithm",
    [
        "equalize",
        "tensorwise",
        "output_cosine",
        "gptq",
        {"gptq": {"refit": True}},
        {"adaround": {"iterations": 5}},
        {"reconstruct": {"iterations": 5}},
        "bn_reestimate",
        "bias_correction",
    ],
    ids=lambda a: a if isinstance(a, str) else "+".join((next(iter(a)), *next(iter(a.values())))),
)
@pytest.mark.parametrize("kind", ["channel", "tensor"])
def test_every_algorithm_works_on_dead_parts(kind: str, algorithm: Any) -> None:
    module = NETS[kind]()
    prepared = _calibrated(module, {"ptq": ["fuse_bn", algorithm]})
    assert _sqnr(module, prepared) > 33


def test_equalization_leaves_the_scale_of_a_dead_channel() -> None:
    prepared = _calibrated(_dead_channel(), {"ptq": ["fuse_bn", "equalize"]})
    assert np.abs(prepared.c.bias.numpy()).max() < 100
    assert np.abs(prepared.c.weight.numpy()[1]).max() < 1e-30


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["channel", "tensor"])
def test_comparison_and_sensitivity_have_numbers_for_dead_parts(kind: str) -> None:
    prepared = _calibrated(NETS[kind]())
    for report in (qtrace.compare(prepared, BATCHES), analyze(prepared, BATCHES)):
        assert "nan" not in report.table().lower()


FORMATS = {
    "onnx": ("backend/onnxruntime", "onnx"),
    "tflite": ("backend/tflite", "tflite"),
    "ncnn": ("backend/ncnn", "ncnn.param"),
    "megengine": ("backend/megengine", "mge"),
}


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        pytest.param(kind, format, marks=[] if (kind, format) == ("channel", "onnx") else pytest.mark.slow)
        for kind in NETS
        for format in FORMATS
    ],
)
def test_files_of_dead_parts_are_exact(tmp_path: Path, kind: str, format: str) -> None:
    recipe, suffix = FORMATS[format]
    converted = qtrace.convert(_calibrated(NETS[kind](), load_recipe(recipe)))
    path = qtrace.export(converted, tmp_path / f"m.{suffix}", format)
    report = qtrace.verify(path, converted, BATCHES[:1])
    assert report.passed, report.table()
