"""allow_float: layers that a file computes in float on purpose, with the weights that the graph rounded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import qtrace
from qtrace import QConfig
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from tests.nets import images, net

INT8 = {"signed": True, "symmetric": True, "rounding": "half_away"}
WEIGHT = {"bits": 16, "axis": 0, "narrow": True}

# Format -> the file, and a config with weights that its int8 layers cannot express.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "ncnn": ("m.param", {"backend": "generic", "activation": {**INT8, "narrow": True}, "weight": WEIGHT}),
    "megengine": ("m.mge", {"backend": "generic", "activation": INT8, "weight": WEIGHT}),
}


def _converted(**config: Any) -> tuple[TracedModule, list[np.ndarray]]:
    batches = [images(2, 4, 8, 8, seed=s) for s in range(2)]
    module = net(
        lambda self, x: self.fc(F.flatten(F.relu(self.c(x)), 1)), c=M.Conv2d(4, 6, 3), fc=M.Linear(216, 5)
    )
    prepared = qtrace.prepare(qtrace.trace(module, batches[0], check=False), QConfig(**config))
    return qtrace.convert(qtrace.calibrate(prepared, batches, progress=False)), batches


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", FORMATS)
def test_layers_that_cannot_be_integers_are_refused_or_float(name: str, tmp_path: Path) -> None:
    file, config = FORMATS[name]
    converted, batches = _converted(**config)
    for allowed in ((), ("linear",)):
        with pytest.raises(
            ExportError, match=r"site c_weight is int16 .*name the kind of its layer in allow_float"
        ):
            qtrace.export(converted, tmp_path / file, format=name, allow_float=allowed)
    assert list(tmp_path.iterdir()) == []
    path = qtrace.export(converted, tmp_path / file, format=name, allow_float=("conv2d", "linear"))
    report = qtrace.verify(path, converted, batches)
    assert report.passed, report.table()
    assert {"x_q"} < set(report.sites["op_by_op"])


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["conv2d", "linear", "add"])
def test_onnxruntime_computes_allowed_float_layers_in_float(kind: str, tmp_path: Path) -> None:
    batches = [images(2, 4, 8, 8, seed=s) for s in range(2)]

    def forward(self: M.Module, x: Any) -> Any:
        y = F.relu(self.c(x))
        return self.fc(F.flatten(y + x, 1))

    module = net(forward, c=M.Conv2d(4, 4, 3, padding=1), fc=M.Linear(256, 5))
    prepared = qtrace.prepare(qtrace.trace(module, batches[0], check=False))
    converted = qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))
    plain = qtrace.export(converted, tmp_path / "plain.onnx")
    kernels = qtrace.verify(plain, converted, batches).kernels
    assert kernels.floats == ()
    path = qtrace.export(converted, tmp_path / "m.onnx", allow_float=kind)
    report = qtrace.verify(path, converted, batches)
    assert report.passed, report.table()
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = Counter(n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node)
    op, integer = {
        "conv2d": ("Conv", "QLinearConv"),
        "linear": ("Gemm", "QGemm"),
        "add": ("Add", "QLinearAdd"),
    }[kind]
    assert kinds[op] + kinds[f"Fused{op}"] == 1, kinds
    assert kinds[integer] == 0, kinds


@pytest.mark.parametrize("file", ["m.onnx", "m.param"])
def test_an_unknown_kind_is_refused_with_those_like_it(file: str, tmp_path: Path) -> None:
    converted, _ = _converted()
    with pytest.raises(ExportError, match=r"allow_float names 'conv2', which is no kind of op: .*conv2d"):
        qtrace.export(converted, tmp_path / file, allow_float=["conv2"])
    assert list(tmp_path.iterdir()) == []
