"""Dynamic layers have uint8 weights where int8 ones would saturate: the file is exact on every processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import qtrace
from qtrace.export.onnx import files
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.kernels import products_saturate
from qtrace.verification.crosscheck import SATURATION
from tests.nets import net

X = np.random.default_rng(0).normal(size=(16, 72)).astype(np.float32)


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    """Two layers of one input, a layer behind them that runs twice with one weight, and a last one."""

    def forward(self: Any, x: Any) -> Any:
        y = F.relu(self.a(x) + self.b(x))
        return self.d(F.relu(self.c(F.relu(self.c(y)))))

    layers = {"a": M.Linear(72, 48), "b": M.Linear(72, 48), "c": M.Linear(48, 48), "d": M.Linear(48, 9)}
    return qtrace.trace(net(forward, **layers), X)


def _dynamic(name: str, **settings: Any) -> dict[str, Any]:
    return {"match": {"op": "linear", "name": name}, "method": "dynamic", **settings}


def _convert(traced: TracedModule, config: Any) -> TracedModule:
    return qtrace.convert(qtrace.calibrate(qtrace.prepare(traced, config), [X], progress=False))


def _weights(path: Path) -> list[tuple[str, str]]:
    """The op that reads each weight of integers, and the type that the weight has."""
    graph = onnx.load(path).graph
    types = {
        t.name: onnx.TensorProto.DataType.Name(t.data_type) for t in graph.initializer if len(t.dims) == 2
    }
    return sorted((n.op_type, types[i]) for n in graph.node for i in n.input if "INT" in types.get(i, ""))


CONFIGS = {
    "all": ({"method": "dynamic"}, {("MatMulInteger", "UINT8")}),
    "affine": (
        {"method": "dynamic", "weight": {"axis": None, "symmetric": False, "narrow": False}},
        {("MatMulInteger", "UINT8")},
    ),
    "one of two that read a value": (
        {"rules": [_dynamic("a*")]},
        {("MatMulInteger", "UINT8"), ("DequantizeLinear", "UINT8")},
    ),
    "the layer that runs twice": (
        {"rules": [_dynamic("c*")]},
        {("MatMulInteger", "UINT8"), ("DequantizeLinear", "UINT8")},
    ),
    "signed activations": (
        {"activation": {"signed": True}, "rules": [_dynamic("c*")]},
        {("MatMulInteger", "UINT8"), ("DequantizeLinear", "INT8")},
    ),
    "7 bits": ({"method": "dynamic", "weight": {"bits": 7}}, {("MatMulInteger", "INT8")}),
    "8 and 7 bits": (
        {"method": "dynamic", "rules": [_dynamic("a*", weight={"bits": 7})]},
        {("MatMulInteger", "INT8"), ("MatMulInteger", "UINT8")},
    ),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_that_can_saturate_are_unsigned(
    name: str, traced: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, types = CONFIGS[name]
    converted = _convert(traced, config)
    monkeypatch.setattr(files, "products_saturate", lambda: True)
    path = qtrace.export(converted, tmp_path / "net.onnx")
    assert set(_weights(path)) == types
    report = qtrace.verify(path, converted, [X])
    assert report.passed, report.table()


@pytest.mark.parametrize("optimized", [False, True])
def test_the_largest_products_are_exact(
    optimized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All inputs are 255 and all weights 127 or -127, which no sum of two products in 16 bits holds."""
    x = np.linspace(1.0, 2.0, 4, dtype=np.float32)[:, None] * np.ones((1, 72), np.float32)
    layer = M.Linear(72, 48)
    signs = np.where(np.arange(48) % 2, 1.0, -1.0)[:, None] * np.ones((48, 72))
    layer.weight[...] = signs.astype(np.float32)
    traced = qtrace.trace(net(lambda self, x: self.a(x), a=layer), x, check=False)
    prepared = qtrace.prepare(traced, {"method": "dynamic"})
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    monkeypatch.setattr(files, "products_saturate", lambda: True)
    path = qtrace.export(converted, tmp_path / "net.onnx")
    options, levels = ort.SessionOptions(), ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    for row in (x, x[:1], x[-1:]):
        np.testing.assert_allclose(
            session.run(None, {"x": row})[0], converted(mge.Tensor(row)).numpy(), rtol=1e-6, atol=1e-6
        )


@pytest.mark.skipif(not products_saturate(), reason="this processor's products do not saturate")
def test_a_file_that_saturates_here_fails_with_the_cause(traced: TracedModule, tmp_path: Path) -> None:
    converted = _convert(traced, {"method": "dynamic"})
    path = qtrace.export(converted, tmp_path / "net.onnx", weights="int8")
    report = qtrace.verify(path, converted, [X])
    assert not report.passed
    assert SATURATION in report.remarks()


def test_a_processor_that_does_not_saturate_keeps_int8(
    traced: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "products_saturate", lambda: False)
    path = qtrace.export(_convert(traced, {"method": "dynamic"}), tmp_path / "net.onnx")
    assert set(_weights(path)) == {("MatMulInteger", "INT8")}
