"""Biases of one number: what MegEngine makes of ``bias[...] = 0``."""

from __future__ import annotations

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
from tests.nets import images, net

BATCHES = [images(2, 3, 8, 8, seed=s) for s in range(2)]
X = mge.Tensor(BATCHES[0])


def _calibrated(module: M.Module, config: Any = None) -> TracedModule:
    module.eval()
    prepared = qtrace.prepare(qtrace.trace(module, BATCHES[0], check=False), config)
    np.testing.assert_allclose(prepared(X).numpy(), module(X).numpy(), rtol=1e-4, atol=1e-5)
    return qtrace.calibrate(prepared, BATCHES, progress=False)


def _filled() -> M.Module:
    """A conv, a transposed conv and a linear layer, each with a bias of one number."""
    module = net(
        lambda self, x: self.l(F.mean(self.t(F.relu(self.c(x))), (2, 3))),
        c=M.Conv2d(3, 6, 3),
        t=M.ConvTranspose2d(6, 5, 2, stride=2),
        l=M.Linear(5, 4),
    )
    for layer in (module.c, module.t, module.l):
        layer.bias[...] = 0.25
        assert layer.bias.numpy().size == 1
    return module


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("backend/onnxruntime", "m.onnx"),
        ("backend/tflite", "m.tflite"),
        pytest.param("backend/ncnn", "m.ncnn.param", marks=pytest.mark.slow),
    ],
)
def test_files_have_one_number_per_channel(tmp_path: Path, recipe: str, name: str) -> None:
    converted = qtrace.convert(_calibrated(_filled(), load_recipe(recipe)))
    report = qtrace.verify(qtrace.export(converted, tmp_path / name), converted, BATCHES[:1])
    assert report.passed, report.table()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"ptq": []},
        {"ptq": ["fuse_bn", "equalize", "bias_correction"]},
        {"qat": {"bn": {"fold": False}, "fakequant": "lsq"}},
    ],
    ids=str,
)
def test_the_parameter_keeps_its_shape_unless_a_norm_is_folded_into_it(config: dict[str, Any]) -> None:
    module = net(lambda self, x: self.d(self.n(self.c(x))), c=M.Conv2d(3, 8, 3), n=M.BatchNorm2d(8))
    module.d = M.Conv2d(8, 4, 1)
    module.c.bias[...] = 0.5
    module.d.bias[...] = 0.0
    prepared = _calibrated(module, config)
    folded = config.get("ptq") != [] and "qat" not in config
    assert prepared.c.bias.numpy().size == (8 if folded else 1)
    assert prepared.d.bias.numpy().size == 1
    np.testing.assert_array_equal(qtrace.convert(prepared)(X).numpy(), prepared(X).numpy())


def test_a_computed_bias_before_a_norm_that_trains_is_converted() -> None:
    module = net(
        lambda self, x: self.n(F.conv2d(x, self.w, F.reshape(self.b, (1, -1, 1, 1)))), n=M.BatchNorm2d(8)
    )
    rng = np.random.default_rng(0)
    module.w = mge.Parameter(rng.normal(size=(8, 3, 3, 3)).astype(np.float32))
    module.b = mge.Parameter(rng.normal(size=8).astype(np.float32))
    prepared = _calibrated(module, {"qat": {"bn": {"fold": False}, "fakequant": "lsq"}})
    np.testing.assert_array_equal(qtrace.convert(prepared)(X).numpy(), prepared(X).numpy())
