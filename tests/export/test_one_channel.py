"""Layers with one output channel, one channel a group, or one value: every scale belongs to its channel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.config.recipe import load_recipe
from qtrace.graph.types import TracedModule
from qtrace.preparation.passes.insert import CONTAINER
from tests.nets import images, net, side_by_side

BATCHES = [images(2, 3, 8, 8, seed=s) for s in range(2)]


def _behind_conv(layer: M.Module) -> M.Module:
    return net(lambda self, x: self.t(F.relu(self.c(x))), c=M.Conv2d(3, 8, 3, padding=1), t=layer)


def _pointwise() -> M.Module:
    return net(
        lambda self, x: self.t(self.e(F.relu(self.d(self.c(x))))),
        c=M.Conv2d(3, 1, 1),
        d=M.Conv2d(1, 1, 1),
        e=M.ConvTranspose2d(1, 1, 1),
        t=M.ConvTranspose2d(1, 1, 2, stride=2),
    )


def _linear() -> M.Module:
    return net(
        lambda self, x: self.b(F.relu(self.a(F.mean(self.c(x), (2, 3))))),
        c=M.Conv2d(3, 4, 1),
        a=M.Linear(4, 1),
        b=M.Linear(1, 1),
    )


NETS: dict[str, Callable[[], M.Module]] = {
    "transposed": lambda: _behind_conv(M.ConvTranspose2d(8, 1, 2, stride=2)),
    "transposed groups": lambda: _behind_conv(M.ConvTranspose2d(8, 4, 2, stride=2, groups=4)),
    "transposed depthwise": lambda: _behind_conv(M.ConvTranspose2d(8, 8, 2, stride=2, groups=8)),
    "conv": lambda: _behind_conv(M.Conv2d(8, 1, 3, padding=1)),
    "groups": lambda: _behind_conv(M.Conv2d(8, 4, 3, groups=4)),
    "pointwise": _pointwise,
    "linear": _linear,
}
RECIPES = {
    "onnx": "backend/onnxruntime",
    "tflite": "backend/tflite",
    "ncnn": "backend/ncnn",
    "megengine": "backend/megengine",
}
SUFFIX = {"onnx": "onnx", "tflite": "tflite", "ncnn": "ncnn.param", "megengine": "mge"}
QUICK = {("transposed", "onnx"), ("transposed", "ncnn"), ("pointwise", "tflite")}


def _calibrated(module: M.Module, config: Any) -> TracedModule:
    module.eval()
    prepared = qtrace.prepare(qtrace.trace(module, BATCHES[0], check=False), config)
    return qtrace.calibrate(prepared, BATCHES, progress=False)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "format"),
    [
        pytest.param(name, format, marks=[] if (name, format) in QUICK else pytest.mark.slow)
        for name in NETS
        for format in RECIPES
    ],
)
def test_every_file_is_exact(tmp_path: Path, name: str, format: str) -> None:
    mge.random.seed(1)
    module = NETS[name]()
    prepared = _calibrated(module, load_recipe(RECIPES[format]))
    x = mge.Tensor(BATCHES[0])
    expected, quantized = module(x).numpy(), prepared(x).numpy()
    assert np.sum((expected - quantized) ** 2) < 0.001 * np.sum(expected**2)
    converted = qtrace.convert(prepared)
    np.testing.assert_array_equal(converted(x).numpy(), quantized)
    path = qtrace.export(converted, tmp_path / f"m.{SUFFIX[format]}", format)
    report = qtrace.verify(path, converted, BATCHES[:1])
    assert report.passed, report.table()


def test_the_scale_of_the_one_channel_covers_all_its_weights() -> None:
    module = NETS["transposed"]()
    prepared = _calibrated(module, {"observers": {"weight": "minmax"}})
    weight, quant = module.t.weight.numpy(), getattr(prepared, CONTAINER).t_weight
    assert quant.shape == (1, 1, 1, 1)
    np.testing.assert_allclose(quant.qparams().scale, [np.abs(weight).max() / 127], rtol=1e-6)


@pytest.mark.parametrize("fakequant", ["lsq", "dorefa", "learned_range"])
def test_one_channel_behind_a_norm_that_trains(fakequant: str) -> None:
    module = net(
        lambda self, x: self.n(self.t(self.c(x))),
        c=M.Conv2d(3, 4, 1),
        t=M.ConvTranspose2d(4, 1, 2, stride=2),
        n=M.BatchNorm2d(1),
    )
    config = {"observers": {"weight": "minmax"}, "qat": {"fakequant": fakequant, "bn": {"fold": False}}}
    prepared = _calibrated(module, config)
    x = mge.Tensor(BATCHES[0])
    np.testing.assert_array_equal(qtrace.convert(prepared)(x).numpy(), prepared(x).numpy())


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
        "bn_reestimate",
        "bias_correction",
    ],
    ids=lambda a: a if isinstance(a, str) else "+".join((next(iter(a)), *next(iter(a.values())))),
)
def test_every_algorithm_works_on_one_channel(algorithm: Any) -> None:
    module = side_by_side({name: NETS[name]() for name in ("transposed", "pointwise")})
    batches = [(batch, batch) for batch in BATCHES]
    prepared = qtrace.prepare(qtrace.trace(module, *batches[0], check=False), {"ptq": ["fuse_bn", algorithm]})
    qtrace.calibrate(prepared, batches, progress=False)
    inputs = [mge.Tensor(x) for x in batches[0]]
    expected, written = prepared(*inputs), qtrace.convert(prepared)(*inputs)
    for name, value in expected.items():
        np.testing.assert_array_equal(written[name].numpy(), value.numpy())
