"""Weights with a scale for each block of inputs, in algorithms, fake quants and exports that read scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qtrace
from qtrace.graph.types import TracedModule
from tests.nets import net

X = np.random.default_rng(0).normal(size=(16, 72)).astype(np.float32)


def _config(block: int = 32, **settings: Any) -> dict[str, Any]:
    rule = {"match": {"op": "linear"}, "weight": {"bits": 4, "block": block}}
    return {"method": "weight_only", "rules": [rule], **settings}


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    forward = lambda self, x: self.b(F.relu(self.a(x)))  # noqa: E731
    return qtrace.trace(net(forward, a=M.Linear(72, 48), b=M.Linear(48, 9)), X, check=False)


def _convert(traced: TracedModule, config: Any) -> TracedModule:
    return qtrace.convert(qtrace.calibrate(qtrace.prepare(traced, config), [X], progress=False))


def _sqnr(exact: np.ndarray, value: np.ndarray) -> float:
    return float(10 * np.log10((exact**2).sum() / ((exact - value) ** 2).sum()))


@pytest.mark.parametrize("block", [32, 128])
def test_the_float_model_has_weights_of_their_own_shape(
    block: int, traced: TracedModule, tmp_path: Path
) -> None:
    """Narrow weights are clipped to the range of each block; 128 covers all inputs."""
    path = qtrace.export(_convert(traced, _config(block)), tmp_path / "net.onnx", "onnx_float")
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    weights = sorted(value.shape for value in stored.values() if value.ndim > 1)
    assert weights == [(9, 48), (48, 72)]
    original = traced.a.weight.numpy()
    (written,) = (value for value in stored.values() if value.shape == (48, 72))
    np.testing.assert_allclose(written, original, rtol=1e-6)  # minmax ranges clip nothing


@pytest.mark.parametrize("fakequant", ["fixed", "lsq", "lsq_plus", "dorefa"])
@pytest.mark.parametrize("algorithm", ["equalize", "bn_reestimate"])
def test_algorithms_and_fake_quants_take_blocks(algorithm: str, fakequant: str, traced: TracedModule) -> None:
    converted = _convert(traced, _config(fakequant=fakequant, ptq=["fuse_bn", algorithm]))
    assert _sqnr(traced(mge.Tensor(X)).numpy(), converted(mge.Tensor(X)).numpy()) > 15


def test_dorefa_stores_what_it_computes(traced: TracedModule) -> None:
    prepared = qtrace.calibrate(qtrace.prepare(traced, _config(fakequant="dorefa")), [X], progress=False)
    before = prepared(mge.Tensor(X)).numpy()
    np.testing.assert_allclose(qtrace.convert(prepared)(mge.Tensor(X)).numpy(), before, atol=1e-6)
