"""Hard sigmoids are one node, or simpler ones for a runtime that has no kernel for the node."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import onnx
import pytest

import qtrace
from qtrace.graph import functions
from tests.nets import images, net, randomize

X = images(1, 3, 12, 12)


def _hsigmoid(self, x):
    return self.last(F.hsigmoid(self.first(x)))


def _hswish(self, x):
    return self.last(F.hswish(self.first(x)))


def _hard_sigmoid(self, x):
    return self.last(functions.hard_sigmoid(self.first(x), 0.2, 0.5))


def _exported(forward, backend: str, file: Path) -> tuple[M.Module, onnx.ModelProto]:
    model = randomize(net(forward, first=M.Conv2d(3, 8, 3), last=M.Conv2d(8, 4, 3)), 0)
    prepared = qtrace.prepare(
        qtrace.trace(model, X, check=False), {"backend": backend, "placement": "everything"}
    )
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    return converted, onnx.load(qtrace.export(converted, file))


@pytest.mark.quick(1)
@pytest.mark.parametrize("forward", [_hsigmoid, _hswish, _hard_sigmoid])
def test_openvino_has_kernels_for_the_pieces(forward, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    file = tmp_path / "net.onnx"
    converted, model = _exported(forward, "openvino", file)
    types = Counter(node.op_type for node in model.graph.node)
    assert (types["HardSigmoid"], types["Clip"]) == (0, 1)
    report = qtrace.verify(file, converted, [images(1, 3, 12, 12, seed=4)], runtime="openvino")
    assert report.passed, report.table()
    assert report.worst_lsb() <= 1, report.table()

    options = {"PERF_COUNT": "YES", "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1"}
    request = openvino.Core().compile_model(str(file), "CPU", options).create_infer_request()
    request.infer([X])
    kernels = [i for i in request.profiling_info if i.status == i.Status.EXECUTED]
    assert not [kernel.node_type for kernel in kernels if "Sigmoid" in kernel.node_type]


@pytest.mark.parametrize("forward", [_hsigmoid, _hswish, _hard_sigmoid])
def test_onnxruntime_has_a_kernel(forward, tmp_path: Path) -> None:
    _, model = _exported(forward, "onnxruntime", tmp_path / "net.onnx")
    types = Counter(node.op_type for node in model.graph.node)
    assert (types["HardSigmoid"], types["Clip"]) == (1, 0)


def test_the_pieces_come_in_as_the_function_that_they_make(tmp_path: Path) -> None:
    _exported(_hard_sigmoid, "openvino", tmp_path / "a.onnx")
    read = qtrace.from_onnx(tmp_path / "a.onnx", {"x": X.shape})
    assert [expr for expr in read.graph.exprs() if "hard_sigmoid" in str(expr)]
