"""Runtimes: which one runs which file, and OpenVINO beside the graph."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from qtrace.verification import runtimes
from tests.each import each_of
from tests.nets import MobileNetV2, ResNet, images, net, randomize


def test_the_suffix_chooses_and_names_are_known() -> None:
    assert runtimes.get(Path("m.onnx")).name == "onnxruntime"
    assert runtimes.get(Path("m.onnx"), "openvino").name == "openvino"
    assert runtimes.get(Path("M.ONNX"), backend="openvino").name == "openvino"
    assert [runtimes.get(Path(name)).name for name in ("M.ONNX", "M.TFLITE")] == ["onnxruntime", "litert"]
    with pytest.raises(ExportError, match="unknown runtime 'openvin'; known: .*onnxruntime, openvino"):
        runtimes.get(Path("m.onnx"), "openvin")
    with pytest.raises(ExportError, match=r"no runtime runs files like m.xml; known: .*\(.onnx\)"):
        runtimes.get(Path("m.xml"))
    with pytest.raises(ExportError, match=r"onnxruntime does not run files like m.xml"):
        runtimes.get(Path("m.xml"), "onnxruntime")
    with pytest.raises(ExportError, match=r"no runtime runs files like \.; known"):
        runtimes.get(Path(""))


def test_a_missing_package_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_backend_chooses_before_the_suffix() -> None:
    path = Path("m.onnx")
    assert runtimes.get(path, backend="openvino").name == "openvino"
    assert runtimes.get(path, "onnxruntime", backend="openvino").name == "onnxruntime"
    for backend in ("", "onnxruntime", "generic", "tensorrt"):
        assert runtimes.get(path, backend=backend).name == "onnxruntime"
    host = qtrace.RuntimeHost("python3")
    chosen = runtimes.get(path, host=host, backend="openvino")
    assert (chosen.name, chosen.host) == ("openvino", host)
    with pytest.raises(ExportError, match="no runtime runs files like m.xml"):
        runtimes.get(Path("m.xml"), backend="openvino")


@each_of("backend", ["openvino", "tensorrt", "esp_ppq"])
def test_a_file_for_another_runtime_has_no_optimizations_in_onnxruntime(backend: str) -> None:
    assert not runtimes.runs_optimized(runtimes.get(Path("m.onnx"), "onnxruntime"), backend)
    assert runtimes.runs_optimized(runtimes.get(Path("m.onnx"), "onnxruntime"), "onnxruntime")
    assert runtimes.runs_optimized(runtimes.get(Path("m.onnx"), "onnxruntime"), "")
    assert runtimes.runs_optimized(runtimes.get(Path("m.onnx"), "openvino"), "openvino")


@pytest.fixture(scope="module")
def float_between(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TracedModule]:
    """A file for OpenVINO with a layer in float between roundings, whose channels differ in range."""

    def forward(self, x):
        return self.last(F.relu(self.middle(F.relu(self.first(x)))))

    model = randomize(net(forward, first=M.Conv2d(3, 8, 3), middle=M.Conv2d(8, 8, 3), last=M.Conv2d(8, 4, 1)))
    gains = np.geomspace(1, 300, 8, dtype=np.float32).reshape(8, 1, 1, 1)
    model.middle.weight[:] = model.middle.weight.numpy() / gains
    model.last.weight[:] = model.last.weight.numpy() * gains.reshape(1, 8, 1, 1)
    config = {"backend": "openvino", "rules": [{"match": {"name": "middle"}, "quantize": False}]}
    prepared = qtrace.prepare(qtrace.trace(model, X, check=False), config)
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    return qtrace.export(converted, tmp_path_factory.mktemp("between") / "m.onnx"), converted


X = images(2, 3, 16, 16)


def test_a_file_for_openvino_is_verified_there(float_between: tuple[Path, TracedModule]) -> None:
    report = qtrace.verify(*float_between, [X])
    assert report.passed, report.table()
    assert "deployed" in report.outputs
    assert "\nin openvino, which the file is for\n" in report.summary()
    assert report.to_dict()["runtime"] == "openvino, which the file is for"
    assert qtrace.bisect(*float_between, [X]) is None


def test_onnxruntime_stands_in_for_openvino_without_optimizations(
    float_between: tuple[Path, TracedModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "_is_installed", lambda runtime: runtime.name != "openvino")
    report = qtrace.verify(*float_between, [X])
    assert report.passed, report.table()
    assert "deployed" not in report.outputs
    (line,) = (line for line in report.summary().splitlines() if line.startswith("in "))
    assert line.startswith(
        "in onnxruntime without its optimizations in the place of openvino, which the file is for and which "
        "is not installed: pip install "
    )
    assert qtrace.bisect(*float_between, [X]) is None


def test_onnxruntime_would_round_the_float_weights_of_that_file(
    float_between: tuple[Path, TracedModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtrace.verification.verify.runs_optimized", lambda runtime, backend: True)
    assert not qtrace.verify(*float_between, [X], runtime="onnxruntime").passed
