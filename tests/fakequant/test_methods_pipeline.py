"""Every method on the whole road: trained, copied, saved, converted, exported, run in onnxruntime."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager
from megengine.jit import trace as jit_trace
from megengine.optimizer import SGD

import qtrace
from qtrace import QConfig
from qtrace.errors import ConfigError
from qtrace.fakequant import scales
from qtrace.fakequant.following.bias import BIAS_LIMIT
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import fake_quants
from tests.nets import images, net

BATCHES = [images(4, 3, 8, 8, seed=s) for s in range(2)]
X = mge.Tensor(BATCHES[0])
pytestmark = pytest.mark.usefixtures("synchronous")

# What a site of each method learns: (weight, activation).
LEARNED = {"dorefa": (0, 0), "learned_range": (1, 2), "lsq_plus": (1, 2), "pact": (1, 1), "tqt": (1, 1)}


def _prepared(name: str, fold: bool, **weight: Any) -> TracedModule:
    module = net(
        lambda self, x: self.fc(F.mean(F.relu(self.bn(self.conv(x))), (2, 3))),
        conv=M.Conv2d(3, 4, 3, padding=1),
        bn=M.BatchNorm2d(4),
        fc=M.Linear(4, 2),
    )
    patch: dict[str, Any] = {"power_of_two": True} if name == "tqt" else {}
    config = QConfig(fakequant=name, qat={"bn": {"fold": fold}}, activation=patch, weight={**patch, **weight})
    return qtrace.prepare(qtrace.trace(module, BATCHES[0], check=False), config)


def _train(prepared: TracedModule, steps: int = 3) -> None:
    qtrace.set_phase(prepared, "train")
    prepared.train()
    parameters = list(prepared.parameters())
    manager, optimizer = GradManager().attach(parameters), SGD(parameters, lr=0.05)
    for _ in range(steps):
        with manager:
            manager.backward(F.mean((prepared(X) - 1.0) ** 2))
        optimizer.step().clear_grad()
    prepared.eval()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "fold"),
    [
        *((name, True) for name in LEARNED),
        *((name, False) for name in ("lsq_plus", "tqt")),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("dorefa", "learned_range", "pact")),
    ],
)
def test_trained_ranges_survive_everything(name: str, fold: bool, tmp_path: Path) -> None:
    if name == "tqt" and not fold:
        with pytest.raises(ConfigError, match=r"site conv_weight: .*bn_out.*powers of two: set qat"):
            _prepared(name, fold)
        return
    prepared = qtrace.calibrate(_prepared(name, fold), BATCHES, progress=False)
    before = [p.numpy().copy() for p in scales(prepared)]
    per_weight, per_activation = LEARNED[name]
    sites = list(fake_quants(prepared))
    assert len(before) == sum(per_weight if fq.static else per_activation for fq in sites)
    _train(prepared)
    moved = [not np.array_equal(a, b.numpy()) for a, b in zip(before, scales(prepared), strict=True)]
    assert sum(moved) >= len(moved) / 2
    # Trained with its BatchNorm in evaluation the ranges go on learning.
    trained = prepared(X).numpy()
    qtrace.set_phase(prepared, "quantize")
    want = prepared(X).numpy()
    np.testing.assert_array_equal(want, trained)
    np.testing.assert_array_equal(copy.deepcopy(prepared)(X).numpy(), want)
    np.testing.assert_allclose(jit_trace(prepared)(X).numpy(), want, atol=1e-5)
    fresh = _prepared(name, fold)
    fresh.load_state_dict(prepared.state_dict())
    qtrace.set_phase(fresh, "quantize")
    np.testing.assert_array_equal(fresh(X).numpy(), want)
    qtrace.save(prepared, tmp_path / "prepared.mge")
    loaded = qtrace.load(tmp_path / "prepared.mge")
    np.testing.assert_array_equal(loaded(X).numpy(), want)
    converted = qtrace.convert(loaded)
    np.testing.assert_array_equal(converted(X).numpy(), want)
    assert not scales(converted)
    report = qtrace.verify(qtrace.export(converted, tmp_path / "m.onnx"), converted, BATCHES)
    assert report.passed, report.table()
    assert report.worst_lsb() == 0


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", ["lsq", "learned_range", "tqt"])
def test_one_scale_for_a_whole_weight_is_learned_beside_a_bias(name: str, fold: bool) -> None:
    prepared = qtrace.calibrate(_prepared(name, fold, axis=None), BATCHES, progress=False)
    before = [p.numpy().copy() for p in scales(prepared)]
    _train(prepared, steps=1)
    moved = [not np.array_equal(a, b.numpy()) for a, b in zip(before, scales(prepared), strict=True)]
    assert sum(moved) >= len(moved) / 2
    trained = prepared(X).numpy()
    np.testing.assert_array_equal(qtrace.convert(prepared)(X).numpy(), trained)


def test_converted_dorefa_holds_the_weights_that_were_trained() -> None:
    prepared = qtrace.calibrate(_prepared("dorefa", True), BATCHES, progress=False)
    raw = prepared.fc.weight.numpy().copy()
    converted = qtrace.convert(prepared)
    np.testing.assert_array_equal(prepared.fc.weight.numpy(), raw)
    reach = np.abs(raw).max(axis=1, keepdims=True)
    want = np.tanh(raw) / np.tanh(reach) * reach
    np.testing.assert_allclose(converted.fc.weight.numpy(), want, rtol=1e-4)


def test_a_bias_too_large_for_int32_widens_to_the_next_power_of_two() -> None:
    module = net(lambda self, x: self.fc(x), fc=M.Linear(4, 2))
    module.fc.weight._reset(module.fc.weight * 1e-9)
    module.fc.bias._reset(mge.Parameter(np.array([10.0, -3.0], np.float32)))
    patch = {"power_of_two": True}
    x = images(4, 1, 4)[:, 0]
    prepared = qtrace.prepare(
        qtrace.trace(module, x, check=False), QConfig(fakequant="tqt", activation=patch, weight=patch)
    )
    qtrace.calibrate(prepared, [x], progress=False)
    product = float(prepared.qsites.x.qparams().scale) * prepared.qsites.fc_weight.qparams().scale.max()
    assert BIAS_LIMIT / 2 < 10.0 / product <= BIAS_LIMIT
    step = float(prepared.qsites.fc_out.qparams().scale)
    assert np.abs(prepared(mge.Tensor(x)).numpy() - module(mge.Tensor(x)).numpy()).max() <= 0.51 * step


def test_a_weight_that_two_schemes_round_cannot_be_transformed() -> None:
    module = net(
        lambda self, x: F.conv2d(x, self.a.weight) + F.conv2d(F.relu(x), self.a.weight, padding=0),
        a=M.Conv2d(3, 3, 1, bias=False),
    )
    traced = qtrace.trace(module, BATCHES[0], check=False)
    first = next(e for e in traced.graph._exprs if "conv2d" in str(getattr(e, "func", "")))
    rule = {"match": {"name": first.outputs[0]._name}, "weight": {"bits": 4}}
    prepared = qtrace.prepare(traced, {"fakequant": "dorefa", "rules": [rule]})
    qtrace.calibrate(prepared, BATCHES, progress=False)
    with pytest.raises(ConfigError, match=r"cannot share it with another scheme"):
        qtrace.convert(prepared)


def test_a_frozen_batchnorm_lets_the_scales_of_weights_learn() -> None:
    prepared = qtrace.calibrate(_prepared("lsq", False), BATCHES, progress=False)
    qtrace.set_phase(prepared, "train")
    parameters = list(prepared.parameters())
    manager = GradManager().attach(parameters)
    with manager:
        manager.backward(F.mean((prepared(X) - 1.0) ** 2))
    assert np.abs(prepared.qsites.conv_weight.scale.grad.numpy()).max() > 0


@pytest.mark.parametrize("fakequant", ["lsq", "pact", "fixed"])
@pytest.mark.parametrize("phase", ["quantize", "train"])
def test_a_symbolic_jit_trace_of_sizes_read_in_the_graph(fakequant: str, phase: str) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = self.c(x)
        return F.relu(y * 1.0 + (F.arange(y.shape[3]) + 0.5).reshape(1, 1, 1, -1))

    x = mge.Tensor(np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32))
    config = {"fakequant": fakequant, "ptq": [], "placement": "everything"}
    prepared = qtrace.prepare(qtrace.trace(net(forward, c=M.Conv2d(3, 4, 3)), x, check=False), config)
    qtrace.calibrate(prepared, [x], progress=False)
    qtrace.set_phase(prepared, phase)
    compiled = jit_trace(lambda value: prepared(value), symbolic=True)
    for _ in range(2):
        np.testing.assert_allclose(compiled(x).numpy(), prepared(x).numpy(), atol=1e-5)
