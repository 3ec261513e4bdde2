"""Outputs that are returned several times, or that are inputs, in every format that a runtime here runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from tests.nets import images, net

FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "three times, and read inside": lambda y, x: [y, y, F.sigmoid(y), y],
    "three names in a dict": lambda y, x: {"a": y, "b": F.relu(y), "c": y, "d": y},
    "nested": lambda y, x: (y, [F.relu(y), (y, F.relu(y))]),
    "an input twice": lambda y, x: (x, F.relu(y), x),
}
FILES = {
    "onnxruntime": "net.onnx",
    "openvino": "net.onnx",
    "tflite": "net.tflite",
    "ncnn": "net.param",
}


def _exported(after: Callable[[Any, Any], Any], backend: str, folder: Path, unused: bool = False) -> Any:
    """Verifies the file of a convolution with ``after`` behind it."""

    def forward(self: M.Module, x: Any) -> Any:
        return after(self.c(x), x)

    def forward_unused(self: M.Module, before: Any, x: Any, behind: Any) -> Any:
        return after(self.c(x), x)

    module = net(forward_unused if unused else forward, c=M.Conv2d(4, 4, 3, padding=1))
    batch = (images(2, 4, 8, 8),) * 3 if unused else images(2, 4, 8, 8)
    traced = qtrace.trace(module, *(batch if unused else (batch,)), check=False)
    prepared = qtrace.prepare(traced, f"backend/{backend}")
    quantized = qtrace.convert(qtrace.calibrate(prepared, [batch], progress=False))
    path = folder / FILES[backend]
    qtrace.export(quantized, path)
    return qtrace.verify(path, quantized, [batch], runtime="openvino" if backend == "openvino" else None)


@pytest.mark.quick(2)
@pytest.mark.parametrize("backend", FILES)
@pytest.mark.parametrize("form", FORMS)
def test_each_output_has_its_place(form: str, backend: str, tmp_path: Path) -> None:
    report = _exported(FORMS[form], backend, tmp_path)
    assert report.passed, report.summary()


@pytest.mark.quick(2)
@pytest.mark.parametrize("backend", FILES)
def test_unused_inputs_keep_their_places(backend: str, tmp_path: Path) -> None:
    report = _exported(lambda y, x: F.relu(y), backend, tmp_path, unused=True)
    assert report.passed, report.summary()
