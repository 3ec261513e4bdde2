"""Weights and biases that depend on an input: the layer stays in float, or `prepare` refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import numpy as np
import pytest

import qtrace
from qtrace.errors import ConfigError
from tests.nets import images, net

X = images(1, 4, 6, 6)
W = mge.Tensor(np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32))
B = mge.Tensor(np.ones((1, 4, 1, 1), np.float32))


def _of(x: Any, value: Any) -> Any:
    return value * F.maximum(F.mean(x, (1, 2, 3)), 0.5)


LAYERS: dict[str, Callable[..., Any]] = {
    "weight-conv2d": lambda _, x: F.conv2d(x, _of(x, W)),
    "bias-conv2d": lambda _, x: F.conv2d(x, W, _of(x, B)),
    "weight-conv_transpose2d": lambda _, x: F.conv_transpose2d(x, _of(x, W)),
    "bias-conv_transpose2d": lambda _, x: F.conv_transpose2d(x, W, _of(x, B)),
    "weight-linear": lambda _, x: F.linear(F.flatten(x, 2), _of(x, F.reshape(W, (4, 36)))),
    "bias-linear": lambda _, x: F.linear(F.flatten(x, 2), F.reshape(W, (4, 36)), _of(x, F.flatten(B))),
}


@pytest.mark.parametrize("backend", ["onnxruntime", "qnn", "openvino"])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_layer_stays_in_float_and_the_file_verifies(layer: str, backend: str, tmp_path: Path) -> None:
    prepared = qtrace.prepare(qtrace.trace(net(LAYERS[layer]), X, check=False), {"backend": backend})
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(path, converted, [X]).passed


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "tensorrt", "megengine", "tflite"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_rule_that_asks_for_integers_is_refused_before_calibration(layer: str, backend: str) -> None:
    traced = qtrace.trace(net(LAYERS[layer]), X, check=False)
    role, kind = layer.split("-")
    rule = {"match": {"op": kind}, "quantize": True}
    if backend == "tensorrt" and role == "bias":  # its biases are floats
        qtrace.prepare(traced, {"backend": backend, "rules": [rule]})
        return
    with pytest.raises(ConfigError, match=f"its {role} is computed from|no integer kernel"):
        qtrace.prepare(traced, {"backend": backend, "rules": [rule]})


@pytest.mark.parametrize("backend", ["tflite", "ncnn"])
@pytest.mark.parametrize("layer", LAYERS)
def test_files_of_stored_weights_refuse_it_before_calibration(layer: str, backend: str) -> None:
    traced = qtrace.trace(net(LAYERS[layer]), X, check=False)
    with pytest.raises(ConfigError, match=f"its {layer.split('-')[0]} is computed from the model's input"):
        qtrace.prepare(traced, {"backend": backend})


def test_a_stored_term_that_is_moved_has_no_integers_of_its_own_in_a_dump(tmp_path: Path) -> None:
    """MegEngine folds what it computes of stored tensors, and its name is lost."""
    shift = mge.Parameter(np.arange(4, dtype=np.float32))
    traced = qtrace.trace(
        net(lambda m, x: F.conv2d(x, W) + F.reshape(m.shift, (1, 4, 1, 1)), shift=shift), X, check=False
    )
    prepared = qtrace.prepare(traced, {"backend": "megengine"})
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    path = qtrace.export(converted, tmp_path / "m.mge", format="megengine")
    assert qtrace.verify(path, converted, [X]).passed
