"""verify: real networks agree with onnxruntime, and planted faults in a file do not pass unseen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qtrace
from qtrace.errors import CalibrationError, ExportError, GraphError
from qtrace.graph.types import TracedModule
from tests.nets import MobileNetV2, ResNet, images, net, randomize


def _converted(module: M.Module, batches: list[np.ndarray]) -> TracedModule:
    prepared = qtrace.prepare(qtrace.trace(module, batches[0], check=False))
    return qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))


@pytest.mark.parametrize(("model", "size"), [(ResNet(64, classes=100), 64), (MobileNetV2(1.0, 100), 64)])
def test_resnet18_and_mobilenetv2_in_onnxruntime(model: M.Module, size: int, tmp_path: Path) -> None:
    randomize(model)
    batches = [images(4, 3, size, size, seed=s) for s in range(4)]
    converted = _converted(model, batches[:3])
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, batches[3:])
    assert report.worst_lsb() <= 1
    assert report.equal_share() >= 0.999
    assert report.sqnr_db("reference") >= 35
    assert report.passed, report.table()
    assert json.loads(json.dumps(report.to_dict()))["passed"] is True


def _net() -> M.Module:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = F.relu(self.a(x))
        return self.fc(F.flatten(F.max_pool2d(F.relu(self.b(y) + y), 2), 1))

    return net(forward, a=M.Conv2d(4, 4, 3, padding=1), b=M.Conv2d(4, 4, 3, padding=1), fc=M.Linear(64, 5))


def _edit(path: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)


def _initializer(model: onnx.ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == name)
    value = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(change(value), value.dtype), name))


FAULTS = {
    "bias scale off by 2": lambda m: _initializer(m, "a_bias_scale", lambda v: v * 2),
    "weights shuffled": lambda m: _initializer(m, "a_weight_int", lambda v: v[::-1]),
    "zero point dropped": lambda m: _initializer(m, "x_zero_point", lambda v: v * 0),
    "weight scales swapped": lambda m: _initializer(m, "b_weight_scale", lambda v: v[::-1]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_fail(fault: str, tmp_path: Path) -> None:
    batches = [images(4, 4, 8, 8, seed=s) for s in range(2)]
    converted = _converted(_net(), batches)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(path, converted, batches).passed
    _edit(path, FAULTS[fault])
    report = qtrace.verify(path, converted, batches)
    assert not report.passed
    assert "FAILED" in report.table()
    wrong = [name for name, tally in report.sites["op_by_op"].items() if tally.worst > 1]
    assert wrong, report.table()


def test_the_first_wrong_site_is_the_faulty_one(tmp_path: Path) -> None:
    batches = [images(4, 4, 8, 8, seed=s) for s in range(2)]
    converted = _converted(_net(), batches)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    _edit(path, FAULTS["weights shuffled"])
    report = qtrace.verify(path, converted, batches)
    wrong = [name for name, tally in report.sites["op_by_op"].items() if tally.worst > 1]
    # Op by op, each site is computed from the runtime's own inputs: later sites are not to blame.
    assert wrong == ["relu_out_q"]


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    batches = [images(4, 4, 8, 8)]
    converted = _converted(_net(), batches)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    other = _converted(net(lambda self, x: self.q(x), q=M.Conv2d(4, 4, 1)), batches)
    with pytest.raises(ExportError, match="not an export of this module"):
        qtrace.verify(path, other, batches)
    with pytest.raises(CalibrationError, match="no batches"):
        qtrace.verify(path, converted, [])
    with pytest.raises(
        CalibrationError, match=r"batch 1 gives 2 inputs.*takes 1 input, x of shape \(4, 4, 8, 8\)"
    ):
        qtrace.verify(path, converted, [batches[0], (batches[0], np.zeros(4, "int32"))])
    with pytest.raises(
        CalibrationError, match=r"batch 0 gives 1 input of shape \(4, 3, 8, 8\), which does not fit"
    ):
        qtrace.verify(path, converted, [batches[0][:, :3]])
    with pytest.raises(ExportError, match="does not exist"):
        qtrace.verify(tmp_path / "none.onnx", converted, batches)
    (tmp_path / "text.onnx").write_text("this is not a model")
    with pytest.raises(ExportError, match="text.onnx"):
        qtrace.verify(tmp_path / "text.onnx", converted, batches)
    with pytest.raises(GraphError, match="not a converted"):
        qtrace.verify(path, qtrace.trace(_net(), batches[0], check=False), batches)


def test_runs_in_eval_mode_and_gives_the_flags_back(tmp_path: Path) -> None:
    batches = [images(4, 4, 8, 8)]
    converted = _converted(
        net(lambda self, x: self.bn(F.exp(self.c(x))), c=M.Conv2d(4, 4, 1), bn=M.BatchNorm2d(4)), batches
    )
    path = qtrace.export(converted, tmp_path / "m.onnx")
    converted.train()
    assert qtrace.verify(path, converted, batches).passed
    assert all(m.training for m in converted.modules())


def test_integer_kernels_are_counted_and_the_others_named(tmp_path: Path) -> None:
    batches = [images(2, 4, 8, 8)]
    module = net(
        lambda self, x: F.mean(self.up(F.relu(self.a(x))), axis=(2, 3)),
        a=M.Conv2d(4, 4, 3, padding=1),
        up=M.ConvTranspose2d(4, 4, 2, 2),
    )
    converted = _converted(module, batches)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, batches)
    assert report.kernels is not None
    assert report.kernels.integer == ("a_out",)
    assert [(op, why.rpartition(" ")[2]) for _, op, why in report.kernels.floats] == [
        ("ConvTranspose", "ConvTranspose"),
        ("ReduceMean", "ReduceMean"),
    ]
    assert "integer kernels: 1 of 3 quantized ops" in report.summary()
    assert report.to_dict()["kernels"]["integer"] == ("a_out",)
    assert qtrace.verify(path, converted, batches, optimized=False).kernels is None


def test_ordinary_networks_run_on_integer_kernels(tmp_path: Path) -> None:
    for model in (ResNet(8), MobileNetV2(0.25, 10)):
        batches = [images(2, 3, 32, 32)]
        converted = _converted(randomize(model), batches)
        path = qtrace.export(converted, tmp_path / "m.onnx")
        kernels = qtrace.verify(path, converted, batches).kernels
        assert kernels is not None
        assert len(kernels.integer) >= 0.9 * (len(kernels.integer) + len(kernels.floats))
