"""Layers, parts of splits and inputs on which no output depends: files have the graph's outputs, no more."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import cv2
import megengine as mge
import megengine.functional as F
import megengine.module as M
import ncnn
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.graph.types import TracedModule
from tests.nets import images, net
from tests.targets.tflite.files import kinds


def _conv(inside: int = 4) -> M.Conv2d:
    return M.Conv2d(inside, 4, 3, padding=1)


def _dead_module(self: Any, x: mge.Tensor) -> mge.Tensor:
    y = F.relu(self.a(x))
    F.sigmoid(self.b(y))
    return self.c(y)


def _shape_of_a_branch(self: Any, x: mge.Tensor) -> mge.Tensor:
    y = F.relu(self.a(x))
    z = F.max_pool2d(F.relu(self.b(y)), 2)
    return F.reshape(F.max_pool2d(self.c(y), 2), z.shape)


def _shape_of_an_op_without_a_form(self: Any, x: mge.Tensor) -> mge.Tensor:
    y = F.relu(self.a(x))
    return F.reshape(self.c(y), F.roll(self.b(y), 1, 1).shape)


def _unused_part(self: Any, x: mge.Tensor) -> mge.Tensor:
    first, _ = F.split(F.relu(self.a(x)), 2, axis=1)
    return self.b(first)


def _shape_of_a_part(self: Any, x: mge.Tensor) -> mge.Tensor:
    first, second = F.split(F.relu(self.a(x)), 2, axis=1)
    return F.reshape(self.b(first), F.relu(self.c(second)).shape)


def _unused_input(self: Any, x: mge.Tensor, z: mge.Tensor) -> mge.Tensor:
    return self.a(x)


def _shape_of_an_input(self: Any, x: mge.Tensor, z: mge.Tensor) -> mge.Tensor:
    return F.reshape(self.a(x), z.shape)


def _pooled(self: Any, x: mge.Tensor) -> mge.Tensor:
    return self.b(F.max_pool2d(self.a(x), 2))


def _layers(inside: int, *names: str) -> dict[str, M.Module]:
    return {name: _conv(inside if name != "a" else 4) for name in names}


# A network and how many convolutions its outputs need.
NETWORKS: dict[str, tuple[M.Module, int]] = {
    "dead module": (net(_dead_module, **_layers(4, "a", "b", "c")), 2),
    "shape of a branch": (net(_shape_of_a_branch, **_layers(4, "a", "b", "c")), 2),
    "shape of an op without a form": (net(_shape_of_an_op_without_a_form, **_layers(4, "a", "b", "c")), 2),
    "unused part": (net(_unused_part, **_layers(2, "a", "b")), 2),
    "shape of a part": (net(_shape_of_a_part, **_layers(2, "a", "b", "c")), 2),
    "unused input": (net(_unused_input, **_layers(4, "a")), 1),
    "shape of an input": (net(_shape_of_an_input, **_layers(4, "a")), 1),
    "pooled integers": (net(_pooled, **_layers(4, "a", "b")), 2),
}

every_network = pytest.mark.parametrize("name", NETWORKS)


def _inputs(name: str) -> list[np.ndarray]:
    return [images(2, 4, 8, 8, seed=seed) for seed in range(1 + ("input" in name))]


def _converted(name: str, config: Any) -> TracedModule:
    inputs = _inputs(name)
    prepared = qtrace.prepare(qtrace.trace(NETWORKS[name][0], *inputs, check=False), config)
    return qtrace.convert(qtrace.calibrate(prepared, [tuple(inputs)], progress=False))


def _verified(path: Path, name: str, converted: TracedModule) -> None:
    report = qtrace.verify(path, converted, [tuple(_inputs(name))], min_sqnr_db=25)
    assert report.passed, report.table()
    assert report.sites["op_by_op"], "no site was compared"


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "config"),
    list(zip(NETWORKS, itertools.cycle(["backend/ncnn", QConfig(backend="ncnn")]), strict=False)),
)
def test_ncnn(name: str, config: Any, tmp_path: Path) -> None:
    converted = _converted(name, config)
    path = qtrace.export(converted, tmp_path / "m.param")
    loaded = ncnn.Net()
    assert loaded.load_param(str(path)) == 0
    (output,) = converted.graph.outputs
    assert loaded.output_names() == [output.name.removesuffix("_q")]
    lines = path.read_text().splitlines()[2:]
    assert sum(line.startswith("Convolution") for line in lines) == NETWORKS[name][1]
    _verified(path, name, converted)


@pytest.mark.quick(2)
@every_network
def test_tflite(name: str, tmp_path: Path) -> None:
    converted = _converted(name, QConfig(backend="tflite"))
    path = qtrace.export(converted, tmp_path / "m.tflite")
    assert kinds(path).count("CONV_2D") == NETWORKS[name][1]
    _verified(path, name, converted)


@pytest.mark.quick(2)
@every_network
def test_megengine(name: str, tmp_path: Path) -> None:
    converted = _converted(name, "backend/megengine")
    path = qtrace.export(converted, tmp_path / "m.mge", format="megengine")
    _verified(path, name, converted)


def _blobs(path: Path, key: str) -> list[str]:
    return [line.split('"')[1] for line in path.read_text().splitlines() if line.strip().startswith(key)]


@pytest.mark.quick(4)
@every_network
def test_caffe(name: str, tmp_path: Path) -> None:
    """Caffe's outputs are the blobs that no layer reads, and OpenCV's is the last layer's."""
    path = qtrace.export(_converted(name, None), tmp_path / "m.prototxt")
    tops = _blobs(path, "top:")
    assert set(tops) - set(_blobs(path, "bottom:")) == {tops[-1]}
    assert path.read_text().count('type: "Convolution"') == NETWORKS[name][1]
    loaded = cv2.dnn.readNetFromCaffe(str(path), str(path.with_suffix(".caffemodel")))
    for argument, value in zip("xz", _inputs(name), strict=False):
        loaded.setInput(value, argument)
    want = NETWORKS[name][0](*map(mge.Tensor, _inputs(name))).numpy()
    np.testing.assert_allclose(loaded.forward(), want, atol=1e-5)


@pytest.mark.parametrize("name", ["shape of a branch", "shape of a part"])
def test_a_parameter_file_names_no_layer_that_is_left_out(name: str, tmp_path: Path) -> None:
    path = qtrace.export(_converted(name, "backend/qnn"), tmp_path / "m.prototxt", params="aimet-0.6.1")
    (parameters,) = (p for p in tmp_path.iterdir() if p.suffix not in (".prototxt", ".caffemodel"))
    data: dict[str, dict[str, Any]] = json.loads(parameters.read_text())
    layers = {key.rpartition(".")[0] for key in data["param_encodings"]}
    assert set(data["activation_encodings"]) <= set(_blobs(path, "top:"))
    assert layers <= set(_blobs(path, "name:"))
    assert layers
