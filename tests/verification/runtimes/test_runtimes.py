"""Runtimes: which one runs which file, and OpenVINO beside the graph."""

from __future__ import annotations

from pathlib import Path

import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.verification import runtimes
from tests.nets import MobileNetV2, ResNet, images, randomize


def test_the_suffix_chooses_and_names_are_known() -> None:
    assert runtimes.get(Path("m.onnx")).name == "onnxruntime"
    assert runtimes.get(Path("m.onnx"), "openvino").name == "openvino"
    with pytest.raises(ExportError, match="unknown runtime 'openvin'; known: .*onnxruntime, openvino"):
        runtimes.get(Path("m.onnx"), "openvin")
    with pytest.raises(ExportError, match=r"no runtime runs files like m.xml; known: .*\(.onnx\)"):
        runtimes.get(Path("m.xml"))
    with pytest.raises(ExportError, match=r"onnxruntime does not run files like m.xml"):
        runtimes.get(Path("m.xml"), "onnxruntime")
    with pytest.raises(ExportError, match=r"no runtime runs files like \.; known"):
        runtimes.get(Path(""))


def test_a_missing_package_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"needs the package openvino: run pip install .*\[openvino\]"):
        runtimes.get(Path("m.onnx"), "openvino")


@pytest.mark.parametrize(
    "model", [ResNet(8, (1, 1)), MobileNetV2(0.25, blocks=(1, 2, 1))], ids=["resnet", "mobilenet"]
)
def test_openvino_computes_each_op_as_the_graph_does(model: object, tmp_path: Path) -> None:
    randomize(model)
    batches = [images(2, 3, 32, 32, seed=s) for s in range(3)]
    prepared = qtrace.prepare(qtrace.trace(model, batches[0], check=False))
    converted = qtrace.convert(qtrace.calibrate(prepared, batches[:2], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, batches[2:], runtime="openvino", optimized=False)
    assert report.worst_lsb() <= 1
    assert report.equal_share() >= 0.999
