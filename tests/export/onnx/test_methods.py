"""Weights alone, and inputs by the range of each batch: the file computes what the graph does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest

import qtrace
from qtrace.errors import ConfigError
from qtrace.graph.types import TracedModule
from qtrace.preparation.figures import describe_precision
from qtrace.preparation.model import QuantizedModel
from tests.each import each_of
from tests.nets import net

X = np.random.default_rng(0).normal(size=(2, 5, 72)).astype(np.float32)
IMAGES = np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(np.float32)
BLOCKS = {"match": {"op": "linear"}, "weight": {"bits": 4, "block": 32, "narrow": False}}


def _rows(self: Any, x: Any) -> Any:
    """Products of three axes with and without bias, of two axes, and two layers that read one value."""
    both = self.a(x) + self.b(x)
    return self.d(F.mean(self.c(F.relu(both)), axis=1))


@pytest.fixture(scope="module")
def rows() -> TracedModule:
    layers = {
        "a": M.Linear(72, 48),
        "b": M.Linear(72, 48, bias=False),
        "c": M.Linear(48, 40),
        "d": M.Linear(40, 9),
    }
    return qtrace.trace(net(_rows, **layers), X)


@pytest.fixture(scope="module")
def images() -> TracedModule:
    forward = lambda self, x: self.c(F.flatten(F.relu(self.b(F.relu(self.a(x)))), 1))  # noqa: E731
    module = net(forward, a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 8, 3, groups=4), c=M.Linear(128, 5))
    return qtrace.trace(module, IMAGES, check=False)


def _converted(traced: TracedModule, config: Any, x: np.ndarray) -> TracedModule:
    return qtrace.convert(qtrace.calibrate(qtrace.prepare(traced, config), [x], progress=False))


def _ops(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


CONFIGS = {
    "channels": {"method": "weight_only"},
    "tensor": {"method": "weight_only", "weight": {"axis": None}},
    "4 bits": {"method": "weight_only", "weight": {"bits": 4}},
    "affine": {
        "method": "weight_only",
        "weight": {"axis": None, "symmetric": False, "signed": False, "narrow": False},
    },
    "blocks": {"method": "weight_only", "rules": [BLOCKS]},
    "blocks of generic": {"method": "weight_only", "rules": [BLOCKS], "backend": "generic"},
    "8 bits in blocks": {"method": "weight_only", "weight": {"block": 16}, "backend": "generic"},
    "dynamic": {"method": "dynamic"},
    "dynamic of 4 bits": {"method": "dynamic", "weight": {"bits": 4}},
    "dynamic per tensor": {
        "method": "dynamic",
        "weight": {"axis": None, "symmetric": False, "narrow": False},
    },
    "one of each": {
        "rules": [
            {"match": {"op": "linear", "name": "a*"}, "method": "dynamic"},
            {"match": {"op": "linear", "name": "c*"}, "method": "weight_only"},
        ]
    },
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_file_computes_what_the_graph_does(name: str, rows: TracedModule, tmp_path: Path) -> None:
    converted = _converted(rows, CONFIGS[name], X)
    path = tmp_path / "net.onnx"
    qtrace.export(converted, path)
    # onnxruntime rounds what is multiplied by blocks of 4 bits to 8 bits, on some processors.
    least = {"one of each": None, "blocks of generic": 40.0}.get(name, 100.0)
    report = qtrace.verify(path, converted, [X, 30 * X[:1]], min_sqnr_db=least)
    assert report.passed, report


@pytest.mark.parametrize("name", ["channels", "4 bits", "dynamic"])
def test_convolutions_have_integers_too_or_stay_as_they_are(
    name: str, images: TracedModule, tmp_path: Path
) -> None:
    converted = _converted(images, CONFIGS[name], IMAGES)
    path = tmp_path / "net.onnx"
    qtrace.export(converted, path)
    assert qtrace.verify(path, converted, [IMAGES], min_sqnr_db=90.0).passed
    assert len(QuantizedModel(converted).sites) == (1 if name == "dynamic" else 3)


def test_a_file_of_blocks_has_the_kernel_of_onnxruntime_in_float32(
    rows: TracedModule, tmp_path: Path
) -> None:
    path = tmp_path / "net.onnx"
    qtrace.export(_converted(rows, CONFIGS["blocks"], X), path)
    products = [node for node in onnx.load(path).graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == 4
    for node in products:
        attributes = {a.name: a.i for a in node.attribute}
        assert (attributes["bits"], attributes["block_size"], attributes["accuracy_level"]) == (4, 32, 1)
    assert "DequantizeLinear" not in _ops(path)


def test_weights_alone_make_the_file_small(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(1, 512)).astype(np.float32)
    traced = qtrace.trace(net(lambda self, x: self.a(x), a=M.Linear(512, 512)), x, check=False)
    sizes = {}
    for name, bits in (("w8", 8.0), ("w4", 4.0)):
        config = {"method": "weight_only", "rules": [BLOCKS]} if name == "w4" else {"method": "weight_only"}
        qtrace.export(_converted(traced, config, x), tmp_path / "net.onnx")
        sizes[name] = (tmp_path / "net.onnx").stat().st_size
        assert sizes[name] < 512 * 512 * (bits / 8 + (0.15 if name == "w4" else 0.05))


def test_layers_that_read_one_value_share_its_rounding(rows: TracedModule, tmp_path: Path) -> None:
    converted = _converted(rows, CONFIGS["dynamic"], X)
    assert next(entry.consumers for entry in QuantizedModel(converted).annotation.dynamic) == (
        "a_out",
        "b_out",
    )
    qtrace.export(converted, tmp_path / "net.onnx")
    assert (
        _ops(tmp_path / "net.onnx").count("DynamicQuantizeLinear"),
        _ops(tmp_path / "net.onnx").count("MatMulInteger"),
    ) == (3, 4)


def test_dynamic_needs_no_data_of_its_range(rows: TracedModule) -> None:
    """Values thousand times those of the calibration are rounded as well."""
    converted = _converted(rows, {"method": "dynamic"}, X)
    for factor in (1.0, 1e3):
        exact, rounded = (model(mge.Tensor(factor * X)).numpy() for model in (rows, converted))
        assert 10 * np.log10((exact**2).sum() / ((exact - rounded) ** 2).sum()) > 30


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["blocks", "dynamic", "one of each"])
def test_models_are_saved_and_loaded(name: str, rows: TracedModule, tmp_path: Path) -> None:
    prepared = qtrace.calibrate(qtrace.prepare(rows, CONFIGS[name]), [X], progress=False)
    for model in (prepared, qtrace.convert(prepared)):
        qtrace.save(model, tmp_path / "net.mge")
        loaded = qtrace.load(tmp_path / "net.mge")
        np.testing.assert_array_equal(loaded(mge.Tensor(X)).numpy(), model(mge.Tensor(X)).numpy())
        assert QuantizedModel(loaded).annotation == QuantizedModel(model).annotation


def test_the_precision_says_the_method(rows: TracedModule) -> None:
    words = {
        name: describe_precision(QuantizedModel(qtrace.prepare(rows, CONFIGS[name])).annotation)
        for name in ("blocks", "dynamic", "one of each")
    }
    assert words == {
        "blocks": "precision: w4 in all 4 layers",
        "dynamic": "precision: w8a8_dynamic in all 4 layers",
        "one of each": "precision: w8a8 in 2 of 4 layers, w8a8_dynamic in 1, w8 in 1",
    }
    explanation = qtrace.explain(qtrace.prepare(rows, CONFIGS["one of each"]))
    reasons = {name: " ".join(explanation.why(name)[0].text(None).split()) for name in ("a_out", "c_out")}
    assert (
        "It rounds what it reads by the range of each batch, and gives floats: rules[0]" in reasons["a_out"]
    )
    assert "only its weight is stored as integers: rules[1] says method: weight_only" in reasons["c_out"]


@pytest.mark.parametrize("name", ["w8", "w4", "w8a8_dynamic"])
def test_recipes_name_the_targets_that_have_the_method(name: str) -> None:
    config = qtrace.load_recipe(name)
    assert (config.backend, config.placement) == ("onnxruntime", "everything")
    assert qtrace.load_recipe(f"vit+{name}").method == config.method
    with pytest.raises(
        ConfigError, match=f"tflite lacks {name}: quantizing by method .* is for generic and onnx"
    ):
        qtrace.load_recipe(f"{name}+tflite")


@each_of(
    ("config", "says"),
    [
        ({"method": "dynamic", "backend": "ncnn"}, "backend ncnn lacks method dynamic: use method: static"),
        (
            {"backend": "tflite", "rules": [{"match": {"op": "linear"}, "method": "weight_only"}]},
            r"rules\[0\]: backend tflite lacks method weight_only",
        ),
        ({"rules": [BLOCKS]}, r"rules\[0\]: a scale for each block of inputs needs .* but a_out is linear"),
        ({"weight": {"bits": 4, "block": 48}}, "it runs blocks of 16, 32, 64, 128, 256"),
        ({"weight": {"bits": 8, "block": 32}}, "blocks of 8 bits"),
        ({"weight": {"axis": None, "block": 32}}, "give the axis of the channels, too"),
        ({"method": "dynamic", "weight": {"bits": 16}}, "multiplies integers of 8 bits"),
        ({"backend": "tflite", "weight": {"block": 32}}, "whole channels"),
    ],
)
def test_unsupported_methods_are_refused_before_calibration(
    config: Any, says: str, rows: TracedModule
) -> None:
    with pytest.raises(ConfigError, match=says):
        qtrace.prepare(rows, config)


def test_gptq_lowers_the_noise_of_block_weights(rows: TracedModule) -> None:
    data = np.random.default_rng(2).normal(size=(64, 5, 72)).astype(np.float32)
    noise = []
    for ptq in ([], ["gptq"]):
        converted = _converted(rows, {**CONFIGS["blocks"], "ptq": ptq}, data)
        noise.append(
            float(((converted(mge.Tensor(data)).numpy() - rows(mge.Tensor(data)).numpy()) ** 2).mean())
        )
    assert noise[1] < 0.9 * noise[0]
