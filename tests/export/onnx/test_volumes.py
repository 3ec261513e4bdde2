"""3-D convolutions: on integers in onnxruntime where that is faster, in float in OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.graph.types import TracedModule
from tests.nets import net, randomize

SHAPE = (2, 16, 5, 8, 7)
RUNTIMES = ("onnxruntime", "openvino")


def _video() -> M.Module:
    def forward(self: Any, x: Any) -> Any:
        y = F.relu(self.b(F.relu(self.a(x))))
        return self.fc(F.mean(y, (2, 3, 4)))

    a, b = M.Conv3d(16, 24, 3, padding=1), M.Conv3d(24, 16, (1, 3, 2), (2, 1, 2), (0, 1, 1), bias=False)
    return randomize(net(forward, a=a, b=b, fc=M.Linear(16, 5)), 0)


def _converted(module: M.Module, recipe: str, shape: tuple[int, ...] = SHAPE) -> tuple[TracedModule, Any]:
    batches = [np.random.default_rng(n).normal(size=shape).astype(np.float32) for n in range(2)]
    prepared = qtrace.prepare(qtrace.trace(module, batches[0], check=False), recipe)
    return qtrace.convert(qtrace.calibrate(prepared, batches, progress=False)), batches


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_video_network_runs_as_in_the_graph(runtime: str, tmp_path: Path) -> None:
    converted, batches = _converted(_video(), f"backend/{runtime}")
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, batches, runtime=runtime)
    assert report.passed, report.table()
    assert report.worst_lsb() <= 1


def test_onnxruntime_computes_them_on_integers(tmp_path: Path) -> None:
    converted, batches = _converted(_video(), "backend/onnxruntime")
    path = qtrace.export(converted, tmp_path / "m.onnx")
    kernels = qtrace.verify(path, converted, batches, runtime="onnxruntime").kernels
    assert kernels is not None
    assert not [name for name, op, _ in kernels.floats if op == "Conv"]
    states = [n.state for n in qtrace.explain(converted).annotation.notes if n.kind == "conv3d"]
    assert states == ["int", "int"]


@pytest.mark.parametrize(("channels", "groups"), [(8, 1), (16, 2), (16, 16)])
def test_slower_ones_stay_in_float_unless_a_rule_asks(channels: int, groups: int, tmp_path: Path) -> None:
    convolution = M.Conv3d(channels, 16, 3, padding=1, groups=groups)
    module = net(lambda self, x: self.b(F.flatten(self.a(x), 3)), a=convolution, b=M.Conv2d(16, 4, 1))
    shape = (2, channels, *SHAPE[2:])
    converted, _ = _converted(module, "backend/onnxruntime", shape)
    (note,) = [n for n in qtrace.explain(converted).annotation.notes if n.kind == "conv3d"]
    assert note.state == "float"
    assert "faster in float" in note.reason
    rule = {"match": {"op": "conv3d"}, "quantize": True}
    asked, batches = _converted(module, {"backend": "onnxruntime", "rules": [rule]}, shape)
    path = qtrace.export(asked, tmp_path / "m.onnx")
    report = qtrace.verify(path, asked, batches, runtime="onnxruntime")
    assert report.passed, report.table()
    assert [n.state for n in qtrace.explain(asked).annotation.notes if n.kind == "conv3d"] == ["int"]


def test_openvino_leaves_them_in_float() -> None:
    converted, _ = _converted(_video(), "backend/openvino")
    notes = [n for n in qtrace.explain(converted).annotation.notes if n.kind == "conv3d"]
    assert [n.state for n in notes] == ["float", "float"]
    assert all("OpenVINO computes 3-D convolutions no faster" in n.reason for n in notes)
