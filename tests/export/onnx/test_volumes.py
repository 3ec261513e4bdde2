"""3-D convolutions: on integers in onnxruntime where that is faster, in float in OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

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


@pytest.mark.quick(1)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_video_network_runs_as_in_the_graph(runtime: str, tmp_path: Path) -> None:
    converted, batches = _converted(_video(), f"backend/{runtime}")
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, batches, runtime=runtime)
    assert report.passed, report.table()
    assert report.worst_lsb() <= 1


def test_onnxruntime_computes_3d_convolutions_on_integers(tmp_path: Path) -> None:
    converted, batches = _converted(_video(), "backend/onnxruntime")
    path = qtrace.export(converted, tmp_path / "m.onnx")
    kernels = qtrace.verify(path, converted, batches, runtime="onnxruntime").kernels
    assert kernels is not None
    assert not [name for name, op, _ in kernels.floats if op == "Conv"]
    states = [n.state for n in qtrace.explain(converted).annotation.notes if n.kind == "conv3d"]
    assert states == ["int", "int"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("channels", "groups"), [(8, 1), (16, 2), (16, 16)])
def test_slower_3d_convolutions_stay_float_unless_a_rule_asks(
    channels: int, groups: int, tmp_path: Path
) -> None:
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


def test_openvino_leaves_3d_convolutions_in_float() -> None:
    converted, _ = _converted(_video(), "backend/openvino")
    notes = [n for n in qtrace.explain(converted).annotation.notes if n.kind == "conv3d"]
    assert [n.state for n in notes] == ["float", "float"]
    assert all("OpenVINO computes 3-D convolutions no faster" in n.reason for n in notes)


def test_a_norm_of_a_file_is_folded(tmp_path: Path) -> None:
    """An imported BatchNorm of five axes is a product and a sum, which the convolution before it takes."""
    random = np.random.default_rng(0)
    stored = {"w": random.normal(size=(24, 16, 3, 3, 3)) * 0.1}
    stored |= {name: np.abs(random.normal(size=24)) + 0.2 for name in ("g", "b", "m", "v")}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3, 3], pads=[1] * 6),
        helper.make_node("BatchNormalization", ["c", "g", "b", "m", "v"], ["n"]),
        helper.make_node("Relu", ["n"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)]
    ends.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    tensors = [numpy_helper.from_array(v.astype(np.float32), name) for name, v in stored.items()]
    graph = helper.make_graph(nodes, "volume", ends[:1], ends[1:], tensors)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "f.onnx",
    )
    x = random.normal(size=SHAPE).astype(np.float32)
    prepared = qtrace.prepare(qtrace.from_onnx(tmp_path / "f.onnx"), "backend/onnxruntime", samples=[x])
    path = qtrace.export(qtrace.convert(qtrace.calibrate(prepared, [x], progress=False)), tmp_path / "m.onnx")
    kinds = [n.op_type for n in onnx.load(path).graph.node if "Linear" not in n.op_type]
    assert kinds == ["Conv", "Relu"]
    (exact,), (rounded,) = (ort.InferenceSession(p).run(None, {"x": x}) for p in (tmp_path / "f.onnx", path))
    assert 10 * np.log10((exact**2).mean() / ((exact - rounded) ** 2).mean()) > 30
