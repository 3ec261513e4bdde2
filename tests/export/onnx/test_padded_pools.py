"""A padding by 0 before max pooling, which onnxruntime's optimizer takes for the pooling's own."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnxruntime as ort
import pytest

import qtrace
from tests.nets import images, net

X = images(2, 3, 8, 8)
WIDTH = ((0, 0), (0, 0), (1, 1), (1, 1))


def _pool_and_add(x: mge.Tensor) -> mge.Tensor:
    return F.max_pool2d(x, 3, 1, 1) + x


POOLED = {
    "function": lambda self, x: F.max_pool2d(F.nn.pad(self.a(x), WIDTH), 3, 2),
    "modules": lambda self, x: self.pool(self.pad(self.a(x))),
    "beside another reader": lambda self, x: _pool_and_add(F.nn.pad(self.a(x), WIDTH)),
    "through an identity": lambda self, x: F.max_pool2d(self.same(F.nn.pad(self.a(x), WIDTH)), 3, 2),
    "another number": lambda self, x: F.max_pool2d(F.nn.pad(self.a(x), WIDTH, constant_value=-0.5), 3, 2),
    "averages": lambda self, x: F.avg_pool2d(F.nn.pad(self.a(x), WIDTH), 3, 2),
}


def _traced(name: str):
    layers = {"a": M.Conv2d(3, 8, 1), "pad": M.Pad(WIDTH), "pool": M.MaxPool2d(3, 2, 0), "same": M.Identity()}
    model = net(POOLED[name], **layers)
    model.a.bias[...] = -3.0  # negative values, which a padding by 0 exceeds
    return qtrace.trace(model, X, check=False)


def _optimized(path: Path) -> np.ndarray:
    (y,) = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": X})
    return y


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", POOLED)
def test_the_padding_counts_in_the_optimized_file(name: str, tmp_path: Path) -> None:
    traced = _traced(name)
    path = qtrace.export(traced, tmp_path / "m.onnx")
    np.testing.assert_allclose(_optimized(path), traced(mge.Tensor(X)).numpy(), atol=1e-5)


@pytest.mark.parametrize("recipe", ["backend/onnxruntime", None])
def test_padding_counts_in_averages_of_a_quantized_file(recipe, tmp_path: Path) -> None:
    prepared = qtrace.prepare(_traced("function"), recipe)
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    report = qtrace.verify(qtrace.export(converted, tmp_path / "m.onnx"), converted, [X])
    assert report.passed, report.table()
