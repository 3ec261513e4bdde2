"""A layer that stays in float between roundings is float in the runtime, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest

import qtrace
from qtrace.export.onnx.cures import hold_float_layers
from tests.nets import images, net, randomize

X = images(4, 3, 16, 16)


def _layers(**layer: M.Module) -> dict[str, M.Module]:
    return {"a": M.Conv2d(3, 16, 3), **layer, "c": M.Conv2d(16, 16, 3)}


def _between(around) -> Any:
    return lambda self, x: self.c(around(self, F.relu(self.a(x))))


def _linear(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    return F.reshape(self.b(F.flatten(F.avg_pool2d(x, 7), 1)), (-1, 16, 3, 3))


def _rows(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    y = self.b(F.transpose(F.reshape(x, (1, 16, 196)), (0, 2, 1)))
    return F.reshape(F.transpose(y, (0, 2, 1)), (1, 16, 14, 14))


NETWORKS = {
    "alone": (_between(lambda self, x: self.b(x)), M.Conv2d(16, 16, 3)),
    "relu": (_between(lambda self, x: F.relu(self.b(x))), M.Conv2d(16, 16, 3)),
    "relu6": (_between(lambda self, x: F.relu6(self.b(x))), M.Conv2d(16, 16, 3, bias=False)),
    "depthwise": (_between(lambda self, x: F.relu(self.b(x))), M.Conv2d(16, 16, 3, groups=16)),
    "grouped": (_between(lambda self, x: self.b(x)), M.Conv2d(16, 16, 3, groups=4)),
    "moved": (
        _between(lambda self, x: F.transpose(self.b(F.transpose(x, (0, 1, 3, 2))), (0, 1, 3, 2))),
        M.Conv2d(16, 16, 3),
    ),
    "pooled": (_between(lambda self, x: F.max_pool2d(self.b(F.max_pool2d(x, 2)), 2)), M.Conv2d(16, 16, 1)),
    "scaled": (_between(lambda self, x: self.b(x) * 0.5 + 1.0), M.Conv2d(16, 16, 3)),
    "upsampled": (_between(lambda self, x: self.b(x)), M.ConvTranspose2d(16, 16, 2, 2)),
    "rows": (_between(_rows), M.Linear(16, 16)),
    "linear": (_between(_linear), M.Linear(64, 144)),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_runtime_computes_the_layer_in_float(tmp_path: Path, name: str) -> None:
    """It rounded its weights to 8 bits: up to a quarter of the results behind it were others."""
    forward, layer = NETWORKS[name]
    x = X[:1] if name == "rows" else X
    path, converted = _export(
        tmp_path, qtrace.trace(randomize(net(forward, **_layers(b=layer))), X[:1], check=False)
    )
    report = qtrace.verify(path, converted, [x])
    assert report.passed
    kinds = _run_kinds(path)
    kind = {"linear": "Gemm", "rows": "Gemm", "upsampled": "ConvTranspose"}.get(name, "Conv")
    assert any(k.endswith(kind) and not k.startswith("QLinear") for k in kinds), kinds
    own, deployed = converted(mge.Tensor(x)).numpy(), _run(path, x)
    assert np.mean(own == deployed) > 0.99


def _export(folder: Path, traced: Any, backend: str = "onnxruntime") -> tuple[Path, Any]:
    rules = [{"match": {"name": "b*"}, "quantize": False}]
    prepared = qtrace.prepare(traced, {"backend": backend, "rules": rules}, samples=[X[:1]])
    converted = qtrace.convert(qtrace.calibrate(prepared, [X[i : i + 1] for i in range(4)], progress=False))
    return qtrace.export(converted, folder / "net.onnx"), converted


@pytest.mark.quick(2)
@pytest.mark.parametrize("backend", ["generic", "qnn", "ryzenai", "ryzenai_xint8"])
def test_devices_of_onnxruntime_compute_float_layers_unfused(tmp_path: Path, backend: str) -> None:
    forward, layer = NETWORKS["alone"]
    traced = qtrace.trace(randomize(net(forward, **_layers(b=layer))), X[:1], check=False)
    path, _ = _export(tmp_path, traced, backend)
    assert "Conv" in _run_kinds(path)
    assert [node.op_type for node in onnx.load(path).graph.node].count("LeakyRelu") == 1


@pytest.mark.parametrize("front", ["Pad", "Mul"])
def test_rounding_is_found_before_ops_that_the_runtime_merges(front: str) -> None:
    """A padding with zeros is merged into the convolution, and a product with 1 is left out."""
    from onnx import TensorProto, helper, numpy_helper

    constants = {
        "w": np.ones((3, 3, 1, 1), np.float32),
        "s": np.float32(0.1),
        "z": np.uint8(0),
        "one": np.float32(1),
        "pads": np.array([0, 0, 1, 1, 0, 0, 0, 0]),
    }
    rounding = ("s", "z")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *rounding], ["q"]),
        helper.make_node("DequantizeLinear", ["q", *rounding], ["d"]),
        helper.make_node(front, ["d", "pads" if front == "Pad" else "one"], ["f"]),
        helper.make_node("Conv", ["f", "w"], ["c"]),
        helper.make_node("QuantizeLinear", ["c", *rounding], ["r"]),
        helper.make_node("DequantizeLinear", ["r", *rounding], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3, None, None]) for n in "xy"]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], stored))
    assert hold_float_layers(model) == 1
    onnx.checker.check_model(model)


def _run(path: Path, x: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def _run_kinds(path: Path) -> list[str]:
    """Returns the nodes that onnxruntime runs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(path.with_suffix(".run")), 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(path.with_suffix(".run")).graph.node]


def test_layers_that_nothing_would_round_are_left_as_they_are(tmp_path: Path) -> None:
    """One in front of an output, and one that reads an input."""
    forward, _ = NETWORKS["alone"]
    traced = qtrace.trace(randomize(net(forward, **_layers(b=M.Conv2d(16, 16, 3)))), X[:1], check=False)
    rules = [{"match": {"name": name}, "quantize": False} for name in ("a*", "c*")]
    prepared = qtrace.prepare(traced, {"backend": "onnxruntime", "rules": rules}, samples=[X])
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    path = qtrace.export(converted, tmp_path / "net.onnx")
    assert "LeakyRelu" not in [node.op_type for node in onnx.load(path).graph.node]
