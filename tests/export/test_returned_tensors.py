"""Outputs of dumps, nets of layers and documents, in the order of the graph; outputs that are stored.

`test_returned_twice` has the other formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import TracedModule
from tests.each import each_of
from tests.nets import images, net

# Format -> recipe, name of a file, runtime that verifies it and options of the export.
FORMATS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "onnxruntime": ("backend/onnxruntime", "m.onnx", "onnxruntime", {}),
    "tflite": ("backend/tflite", "m.tflite", "litert", {}),
    "megengine": ("backend/megengine", "m.mge", "megengine", {"format": "megengine"}),
}


def _repeated(self: Any, x: Any) -> Any:
    y = self.c(x)
    return [y, y, F.sigmoid(y), y]


def _nested(self: Any, x: Any) -> Any:
    y = self.c(x)
    return {"b": (y, self.d(F.relu(y))), "a": y, "c": {"d": y, "a": F.relu(y)}}


def _inputs(self: Any, x: Any) -> Any:
    return x, self.c(x), x


def _first_and_last_unread(self: Any, x: Any, y: Any, z: Any) -> Any:
    return self.c(y)


FORMS: dict[str, tuple[Callable[..., Any], int]] = {
    "repeated": (_repeated, 1),
    "nested": (_nested, 1),
    "inputs": (_inputs, 1),
    "unread inputs": (_first_and_last_unread, 3),
}


def _traced(forward: Callable[..., Any], count: int) -> tuple[TracedModule, tuple[np.ndarray, ...]]:
    batch = tuple(images(2, 4, 6, 6, seed=seed) for seed in range(count))
    layers = {"c": M.Conv2d(4, 4, 1), "d": M.Conv2d(4, 4, 1)}
    return qtrace.trace(net(forward, **layers), *batch), batch


def _converted(
    forward: Callable[..., Any], count: int, recipe: str
) -> tuple[TracedModule, list[tuple[np.ndarray, ...]]]:
    traced, batch = _traced(forward, count)
    prepared = qtrace.prepare(traced, recipe)
    return qtrace.convert(qtrace.calibrate(prepared, [batch], progress=False)), [batch]


@pytest.mark.quick(2)
@pytest.mark.parametrize("form", FORMS)
def test_dumps_give_the_outputs_of_the_graph_in_its_order(form: str, tmp_path: Path) -> None:
    recipe, name, runtime, options = FORMATS["megengine"]
    converted, batches = _converted(*FORMS[form], recipe)
    path = qtrace.export(converted, tmp_path / name, **options)
    report = qtrace.verify(path, converted, batches, runtime=runtime)
    assert report.passed, report.summary()


def _stored(self: Any, x: Any) -> Any:
    return self.c(x), self.d.weight


@pytest.mark.parametrize("target", ["onnxruntime", "tflite"])
def test_a_stored_tensor_is_returned(target: str, tmp_path: Path) -> None:
    recipe, name, runtime, options = FORMATS[target]
    converted, batches = _converted(_stored, 1, recipe)
    path = qtrace.export(converted, tmp_path / name, **options)
    assert qtrace.verify(path, converted, batches, runtime=runtime).passed


def _cast(self: Any, x: Any) -> Any:
    y = self.c(x)
    return y, y.astype("int32")


def _largest(self: Any, x: Any) -> Any:
    return F.argmax(self.c(x), axis=1)


def _places(self: Any, x: Any) -> Any:
    return F.topk(F.flatten(self.c(x), 1), 2)[1]


def _positive(self: Any, x: Any) -> Any:
    y = self.c(x)
    return {"mask": y > 0, "y": y}


@each_of("forward", [_cast, _largest, _places, _positive, _stored])
def test_ncnn_refuses_outputs_that_are_no_floats_of_its_own(
    forward: Callable[..., Any], tmp_path: Path
) -> None:
    converted, _ = _converted(forward, 1, "backend/ncnn")
    with pytest.raises(
        ExportError, match="computes in floats: end|cannot become ncnn|is a parameter"
    ) as refused:
        qtrace.export(converted, tmp_path / "m.param")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


# OpenCV drops Caffe's Silence layers and shows inputs that nothing reads as outputs.
@pytest.mark.parametrize("form", [form for form in FORMS if form != "unread inputs"])
def test_caffe_nets_give_the_outputs_of_the_graph_in_its_order(form: str, tmp_path: Path) -> None:
    traced, batch = _traced(*FORMS[form])
    path = qtrace.export(traced, tmp_path / "m.prototxt")
    loaded = cv2.dnn.readNetFromCaffe(str(path), str(path.with_suffix(".caffemodel")))
    for node, value in zip(traced.graph.inputs[1:], batch, strict=True):
        loaded.setInput(value, node.name)
    outputs = loaded.forward(loaded.getUnconnectedOutLayersNames())
    expected = [t.numpy() for t in Interpreter(traced).run_flat(*map(mge.Tensor, batch))]
    assert len(outputs) == len(expected)
    for value, reference in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(value, reference, atol=1e-5)


@each_of("forward", [_repeated, _nested, _inputs, _stored, _cast, _largest])
def test_msc_documents_hold_every_output(forward: Callable[..., Any], tmp_path: Path) -> None:
    traced, _ = _traced(forward, 1)
    path = qtrace.export(traced, tmp_path / "m.json", format="msc")
    document = json.loads(path.read_text())
    aliases = {t["name"]: t["alias"] for node in document["nodes"] for t in node["outputs"]}
    names = [aliases[name] or name.removesuffix(":0") for name in document["outputs"]]
    assert names == [node.name for node in traced.graph.outputs]
