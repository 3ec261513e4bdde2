"""Weights of 7 bits where products of 8 saturate: the configs they are in question for, and what decides."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.benchmarking.fitting import ProcessorFit, Trend
from qtrace.benchmarking.turns import Speed
from qtrace.config import QConfig
from qtrace.config.recipe import as_qconfig
from qtrace.costs import FLOAT, INTEGER, INTEGER_7, CostTable
from qtrace.errors import ConfigError
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.record import read_record
from qtrace.quantizing import measuring
from qtrace.quantizing.labellings import find_labellings
from qtrace.quantizing.measuring import prepare_measured
from qtrace.quantizing.placing import TimingPlan
from qtrace.quantizing.reporting import LogReporter
from qtrace.quantizing.times import Times
from qtrace.quantizing.weight_bits import with_fewer_bits
from tests.nets import images, net

DATA = images(8, 3, 48, 48)
CONFIG = as_qconfig({"placement": "balanced"})


@pytest.mark.parametrize(
    "says",
    [
        {"weight": {"bits": 8}},
        {"weight": {"bits": 4}},
        {"rules": [{"match": {"op": "linear"}, "weight": {"bits": 4}, "optional": True}]},
        {"method": "dynamic"},
        {"method": "weight_only"},
        {"activation": {"bits": 16}},
        {"rules": [{"match": {"op": "add"}, "output": {"bits": 16}, "optional": True}]},
        {"backend": "openvino"},
        {"backend": "tensorrt"},
    ],
)
def test_a_config_that_says_what_weights_are_keeps_them(says: dict) -> None:
    assert with_fewer_bits(as_qconfig({"placement": "balanced", **says})) is None


def test_rules_of_the_config_stay_behind_that_of_depthwise_layers() -> None:
    config = as_qconfig({"rules": [{"match": {"op": "add"}, "quantize": False, "optional": True}]})
    fewer = with_fewer_bits(config)
    assert fewer is not None
    assert fewer.weight_bits == 7
    assert fewer.rules[1:] == config.rules
    assert config.weight_bits == 8


def _traced():
    layers = {
        "a": M.Conv2d(3, 32, 3),
        "b": M.Conv2d(32, 32, 3, groups=32),
        "c": M.Conv2d(32, 32, 3),
        "d": M.Conv2d(32, 8, 3),
    }

    def forward(self, x):
        return self.d(F.relu(self.c(F.relu(self.b(F.relu(self.a(x)))))))

    return qtrace.trace(net(forward, **layers), DATA[:1], check=False)


def _fit(seven: float) -> ProcessorFit:
    """Returns the fit of a processor on which integer convolutions are half as fast as the table says."""
    machine = replace(CostTable.load("onnxruntime").machine, processor="another")
    factors = {("conv", FLOAT): 3.0, ("conv", INTEGER): 2.0, ("conv", INTEGER_7): seven}
    return ProcessorFit(machine, {key: Trend.of([factor], []) for key, factor in factors.items()})


def _prepare(
    path: Path, monkeypatch, fit: ProcessorFit, fewer: float, in_float: bool = True, config: QConfig = CONFIG
):
    """Prepares where labellings with weights of 7 bits are ``fewer`` times as fast as those of 8."""
    monkeypatch.setattr(measuring, "find_labellings", find_labellings)
    monkeypatch.setattr(measuring, "fit_costs", lambda config: fit)
    timed: list[float] = []

    def timer(paths, **options):
        speeds = [fewer if has_int8(path) else 0.5 if is_float(path) else 1.0 for path in paths]
        timed.extend(speeds)
        return [Speed(1e-3 / s, s / speeds[0], s / speeds[0], s / speeds[0], 30) for s in speeds]

    times = Times.open(path)
    plan = TimingPlan(times, timer, in_float)
    prepared = prepare_measured(_traced(), config, [DATA[:4]], lambda: [DATA[4:]], plan, LogReporter())
    times.write()
    return prepared


def _weights(path: Path) -> list:
    import onnx
    from onnx import numpy_helper

    stored = onnx.load(path).graph.initializer
    return [
        numpy_helper.to_array(t).astype(int) for t in stored if len(t.dims) == 4 and t.data_type in (2, 3)
    ]


def is_float(path: Path) -> bool:
    return not _weights(path)


def has_int8(path: Path) -> bool:
    """Whether weights of more than one channel a group have 7 bits, as int8 or as uint8 around 128."""
    large = [w for w in _weights(path) if w.shape[1] > 1]
    return bool(large) and all(min(abs(w).max(), abs(w - 128).max()) <= 64 for w in large)


def _bits(prepared) -> dict[str, int]:
    sites = QuantizedModel(prepared).annotation.sites
    return {site.name: site.plan.scheme.bits for site in sites if site.sort == "weight"}


@pytest.mark.parametrize(("fewer", "bits"), [(1.5, 7), (0.7, 8)])
def test_what_is_measured_better_decides_the_bits(tmp_path, monkeypatch, caplog, fewer, bits) -> None:
    path = tmp_path / "times.json"
    with caplog.at_level(logging.INFO, "qtrace"):
        prepared = _prepare(path, monkeypatch, _fit(1.0), fewer)
    found = _bits(prepared)
    assert set(found.values()) == ({7, 8} if bits == 7 else {8})  # depthwise layers keep 8
    assert any("weights have 7 bits" in line for line in caplog.messages) == (bits == 7)
    assert json.loads(path.read_text())["weight_bits"] == bits
    again = _prepare(path, monkeypatch, _fit(1.0), 99.0)  # the given times decide
    assert _bits(again) == found
    assert read_record(again).annotation.to_json() == read_record(prepared).annotation.to_json()


def test_a_graph_to_train_on_keeps_8_bits(tmp_path, monkeypatch) -> None:
    prepared = _prepare(tmp_path / "times.json", monkeypatch, _fit(1.0), 1.5, in_float=False)
    assert set(_bits(prepared).values()) == {8}


def test_where_only_7_bits_gain_time_they_are_in_question(tmp_path, monkeypatch) -> None:
    """With 8 bits nothing gains time, so that the first search finds no labelling to measure."""
    fit = _fit(0.5)
    slow = {
        **fit.factors,
        ("conv", INTEGER): Trend.of([9.0], []),
        ("depthwise", INTEGER): Trend.of([9.0], []),
    }
    prepared = _prepare(tmp_path / "times.json", monkeypatch, replace(fit, factors=slow), 1.5)
    assert 7 in _bits(prepared).values()


@pytest.mark.parametrize(("seven", "bits"), [(0.5, 7), (2.5, 8)])
def test_the_fastest_placement_has_the_bits_of_the_least_time(tmp_path, monkeypatch, seven, bits) -> None:
    config, path = as_qconfig({"placement": "fastest"}), tmp_path / "times.json"
    for _ in range(2):  # the second time by the file
        prepared = _prepare(path, monkeypatch, _fit(seven), 1.0, config=config)
        assert (7 in _bits(prepared).values()) == (bits == 7)
        assert json.loads(path.read_text())["weight_bits"] == bits


@pytest.mark.parametrize(
    "says",
    [
        {"weight": {"bits": 8}},
        {"activation": {"bits": 16}},
        {"method": "weight_only"},
        {"rules": [{"match": {"op": "conv2d"}, "weight": {"bits": 4}}]},
    ],
)
def test_times_of_other_bits_are_refused(tmp_path, monkeypatch, says) -> None:
    path = tmp_path / "times.json"
    _prepare(path, monkeypatch, _fit(1.0), 1.5)
    with pytest.raises(ConfigError, match="or other bits"):
        _prepare(path, monkeypatch, _fit(1.0), 1.5, config=as_qconfig({"placement": "balanced", **says}))
    observers = {"placement": "balanced", "observers": {"activation": "minmax"}}
    _prepare(path, monkeypatch, _fit(1.0), 1.5, config=as_qconfig(observers))  # the same kernels
