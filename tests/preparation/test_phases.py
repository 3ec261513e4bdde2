"""Phases: parameters come from calibration or from a state dict; entering train warns of MegEngine's race."""

from __future__ import annotations

import json
import warnings
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
from qtrace.errors import CalibrationError, GraphError, QtraceWarning, TrainingError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import fake_quants, read_record
from tests.each import each_of
from tests.nets import images, net

BATCHES = [images(4, 3, 8, 8, seed=s) for s in range(2)]
X = mge.Tensor(BATCHES[0])
pytestmark = pytest.mark.usefixtures("synchronous")


def _prepared(**config: Any) -> TracedModule:
    module = net(
        lambda self, x: self.fc(F.mean(F.relu(self.bn(self.conv(x))), (2, 3))),
        conv=M.Conv2d(3, 4, 3, padding=1),
        bn=M.BatchNorm2d(4),
        fc=M.Linear(4, 2),
    )
    return qtrace.prepare(qtrace.trace(module, BATCHES[0], check=False), QConfig(**config))


def _trained(**config: Any) -> TracedModule:
    """A module that has left the calibrated parameters behind."""
    prepared = qtrace.calibrate(_prepared(**config), BATCHES, progress=False)
    qtrace.set_phase(prepared, "train")
    parameters = list(prepared.parameters())
    manager, optimizer = GradManager().attach(parameters), SGD(parameters, lr=0.05)
    for _ in range(2):
        with manager:
            manager.backward(F.mean(prepared(X) ** 2))
        optimizer.step().clear_grad()
    qtrace.set_phase(prepared, "quantize")
    return prepared


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("fakequant", ["fixed", "lsq"])
def test_a_fresh_module_goes_on_from_a_state_dict(fakequant: str, fold: bool) -> None:
    config = {"fakequant": fakequant, "qat": {"bn": {"fold": fold}}}
    saved = _trained(**config)
    fresh = _prepared(**config)
    with pytest.raises(CalibrationError, match=r"lack quantization parameters.*qtrace\.calibrate"):
        qtrace.set_phase(fresh, "quantize")
    fresh.load_state_dict(saved.state_dict())
    for phase in ("quantize", "train"):
        for model in (saved, fresh):
            qtrace.set_phase(model, phase)
        np.testing.assert_array_equal(fresh(X).numpy(), saved(X).numpy())
        np.testing.assert_array_equal(jit_trace(fresh)(X).numpy(), jit_trace(saved)(X).numpy())
    np.testing.assert_array_equal(qtrace.convert(fresh)(X).numpy(), qtrace.convert(saved)(X).numpy())


@pytest.mark.parametrize("phase", ["quantize", "train"])
@pytest.mark.parametrize("fakequant", ["fixed", "lsq"])
def test_without_parameters_there_is_no_quantizing(phase: str, fakequant: str) -> None:
    prepared = _prepared(fakequant=fakequant)
    prepared.load_state_dict(_prepared(fakequant=fakequant).state_dict())
    with pytest.raises(CalibrationError, match=rf"the first is x.*qtrace\.calibrate.*'{phase}'"):
        qtrace.set_phase(prepared, phase)
    with pytest.raises(CalibrationError, match="never calibrated"):
        qtrace.convert(prepared)
    assert {fq.phase for fq in fake_quants(prepared)} == {"float"}


def test_one_channel_without_a_scale_is_not_calibrated() -> None:
    prepared = qtrace.calibrate(_prepared(), BATCHES, progress=False)
    state, name = prepared.state_dict(), "qsites.conv_weight.scale"
    some = np.arange(4).reshape(4, 1, 1, 1) != 1
    prepared.load_state_dict({**state, name: state[name] * some})
    with pytest.raises(CalibrationError, match="1 sites.*conv_weight"):
        qtrace.set_phase(prepared, "quantize")


def test_training_from_a_queue_is_warned_of() -> None:
    prepared = qtrace.calibrate(_prepared(), BATCHES, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qtrace.set_phase(prepared, "train")
        mge.config.async_level = 1
        for phase in ("float", "observe", "quantize"):
            qtrace.set_phase(prepared, phase)
    with pytest.warns(QtraceWarning, match=r"async_level 1: .*async_level = 0") as caught:
        qtrace.set_phase(prepared, "train")
    assert [w.filename for w in caught] == [__file__]


@each_of("change", ["cut", "no JSON", "deep", "stage", "key", "config", "number"])
def test_a_damaged_record_is_reported(change: str) -> None:
    prepared = _prepared()
    text = prepared.qtrace_record
    prepared.qtrace_record = {
        "cut": text[:-1],
        "no JSON": "",
        "deep": "[" * 100_000,
        "stage": text.replace('"stage": "prepared"', '"stage": "praepariert"'),
        "key": text.replace("channel_axes", "channel_axles"),
        "config": json.dumps({**json.loads(text), "qconfig": []}),
        "number": 3,
    }[change]
    with pytest.raises(GraphError, match="the quantization record of the model is damaged"):
        read_record(prepared)


def test_training_warns_of_a_layer_with_a_wrong_gradient() -> None:
    module = net(lambda self, x: self.h(self.cell(x)[0]), cell=M.LSTM(4, 6, proj_size=3), h=M.Linear(6, 2))
    x = np.ones((3, 2, 4), np.float32)
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), {"ptq": [], "placement": "everything"})
    qtrace.calibrate(prepared, [x], progress=False)
    with pytest.warns(QtraceWarning, match=r"cell is of type LSTM, whose gradient is wrong in MegEngine"):
        qtrace.set_phase(prepared, "train")
    with pytest.raises(TrainingError, match=r"cell is of type LSTM, whose gradient is wrong in MegEngine"):
        qtrace.finetune(prepared, [x], progress=False)
