"""Without a package, the command says which extra brings it, and nothing is written."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import megengine.module as M
import pytest

import qtrace
from qtrace import plugins
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from qtrace.verification import runtimes
from tests.each import each_of
from tests.nets import images, net

X = images(2, 4, 8, 8)


@pytest.fixture(scope="module")
def converted() -> TracedModule:
    prepared = qtrace.prepare(
        qtrace.trace(net(lambda self, x: self.c(x), c=M.Conv2d(4, 4, 3)), X, check=False)
    )
    return qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))


def _hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = importlib.util.find_spec

    def find(name: str, parent: str | None = None) -> ModuleSpec | None:
        return None if name.split(".")[0] == package.split(".")[0] else real(name, parent)

    monkeypatch.setattr(importlib.util, "find_spec", find)


# Format -> the file, the package that is missing, the extra that brings it.
FORMATS = {
    "onnx": ("m.onnx", "onnx", "onnx"),
    "onnx_float": ("m.onnx", "onnx", "onnx"),
    "caffe": ("m.prototxt", "google", "caffe"),
    "tflite": ("m.tflite", "ai_edge_litert", "tflite"),
}


@each_of("name", FORMATS)
def test_export(name: str, converted: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, package, extra = FORMATS[name]
    _hide(monkeypatch, package)
    with pytest.raises(
        ExportError, match=rf"needs the package .*: run pip install -e '\.\[{extra}\]' in the checkout"
    ):
        qtrace.export(converted, tmp_path / file, format=name)
    assert list(tmp_path.iterdir()) == []


RUNTIMES = {
    "onnxruntime": ("m.onnx", "onnxruntime", "onnx"),
    "openvino": ("m.onnx", "openvino", "openvino"),
    "ncnn": ("m.param", "ncnn", "ncnn"),
    "litert": ("m.tflite", "ai_edge_litert", "tflite"),
}


@each_of("name", RUNTIMES)
def test_verify(name: str, converted: TracedModule, monkeypatch: pytest.MonkeyPatch) -> None:
    file, package, extra = RUNTIMES[name]
    _hide(monkeypatch, package)
    for run in (qtrace.verify, qtrace.bisect):
        with pytest.raises(ExportError, match=rf"needs the package {package}: .*'\.\[{extra}\]'"):
            run(Path(file), converted, [X], runtime=name)


def test_every_extra_that_is_named_exists() -> None:
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for name in runtimes.known():
        extra = runtimes.get(Path("m" + _suffix(name)), name).extra
        assert not extra or f"\n{extra} = [" in declared, name


def _suffix(name: str) -> str:
    return plugins.load_object("qtrace.runtimes", name, runtimes.Runtime).suffixes[0]
