"""Settings that do nothing, or find no layer, with `method: weight_only` and `dynamic`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import CalibrationError, ConfigError, ExportError
from qtrace.graph.types import TracedModule
from tests.each import each_of
from tests.nets import net

X = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
METHODS = ("weight_only", "dynamic")


@pytest.fixture(scope="module")
def mlp() -> TracedModule:
    return qtrace.trace(
        net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Linear(64, 48), b=M.Linear(48, 9)), X, check=False
    )


def _calibrated(traced: TracedModule, config: Any, batch: np.ndarray = X) -> TracedModule:
    return qtrace.calibrate(qtrace.prepare(traced, config), [batch], progress=False)


def test_a_placement_does_not_deny_the_stored_weights(
    mlp: TracedModule, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="qtrace"):
        qtrace.prepare(mlp, {"method": "weight_only", "placement": "balanced"})
    assert "no file would be smaller" not in caplog.text
    assert "stores only 2 weights as integers" in caplog.text


def test_an_opset_without_blocks_is_refused_in_a_sentence(mlp: TracedModule, tmp_path: Path) -> None:
    rule = {"match": {"op": "linear"}, "weight": {"bits": 4, "block": 32, "narrow": False}}
    config = {"method": "weight_only", "backend": "generic", "rules": [rule]}
    with pytest.raises(ExportError, match="opset=13 lacks scales for blocks of a weight: .* choose 21"):
        qtrace.export(qtrace.convert(_calibrated(mlp, config)), tmp_path / "net.onnx", opset=13)


@each_of("key", ["activation", "output"])
@each_of("method", METHODS)
def test_a_rule_refuses_a_scheme_that_its_method_does_not_read(
    method: str, key: str, mlp: TracedModule
) -> None:
    rule = {"match": {"op": "linear"}, "method": method, key: {"bits": 4}}
    with pytest.raises(ConfigError, match=rf"rules\[0\]: with method: {method} .* {key} does nothing"):
        qtrace.prepare(mlp, {"rules": [rule]})


def test_a_config_says_that_its_scheme_is_not_read(
    mlp: TracedModule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = {"method": "dynamic", "activation": {"bits": 4}}
    qtrace.prepare(mlp, content)
    assert "activation does nothing with method: dynamic" in caplog.text
    path = tmp_path / "own.yaml"
    path.write_text("schema: qtrace/1\nmethod: dynamic\nactivation: {bits: 4}\n")
    with pytest.raises(ConfigError, match="own.yaml:3: activation does nothing with method: dynamic"):
        qtrace.prepare(mlp, path)
    path.write_text(path.read_text() + "rules: [{match: {op: linear, position: last}, method: static}]\n")
    qtrace.prepare(mlp, path)


@pytest.mark.parametrize("recipe", ["onnxruntime+w8", "vit+w8", "w4a8+w8", "w8a16+w8a8_dynamic"])
def test_joined_recipes_may_set_both(
    recipe: str, mlp: TracedModule, caplog: pytest.LogCaptureFixture
) -> None:
    qtrace.prepare(mlp, recipe)
    assert "does nothing" not in caplog.text


@pytest.mark.parametrize("method", METHODS)
def test_a_fake_quant_is_checked_for_the_weights_alone(method: str, mlp: TracedModule) -> None:
    weight = {"power_of_two": True}
    qtrace.prepare(mlp, {"method": method, "fakequant": "tqt", "weight": weight})
    rule = {"match": {"op": "linear"}, "method": method, "fakequant": "tqt", "weight": weight}
    qtrace.prepare(mlp, {"rules": [rule]})
    with pytest.raises(ConfigError, match="weights: tqt learns powers of two"):
        qtrace.prepare(mlp, {"method": method, "fakequant": "tqt"})


@pytest.mark.parametrize("method", METHODS)
def test_products_with_parameters_name_the_method(method: str) -> None:
    p = mge.Parameter(np.ones((64, 9), np.float32))
    traced = qtrace.trace(net(lambda self, x: F.relu(F.matmul(x, self.p)), p=p), X, check=False)
    with pytest.raises(CalibrationError, match=f"lacks sites, as the method .* says method: {method}"):
        _calibrated(traced, {"method": method})


def test_dynamic_convolutions_name_the_method() -> None:
    images = np.zeros((2, 3, 9, 9), np.float32)
    traced = qtrace.trace(net(lambda self, x: F.relu(self.a(x)), a=M.Conv2d(3, 6, 3)), images, check=False)
    with pytest.raises(CalibrationError, match="method: dynamic, which backend onnxruntime does not have"):
        _calibrated(traced, "w8a8_dynamic", images)
