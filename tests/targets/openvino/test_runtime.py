"""OpenVINO: its plain mode computes what the file says, op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from megengine import Parameter
from onnx import TensorProto, helper, numpy_helper

import qtrace
from qtrace.runtimes import worker
from qtrace.targets.openvino.spelled import spell_out_roundings
from qtrace.verification.crosscheck import BFLOAT16
from tests.each import each_of
from tests.nets import images, net, randomize

X = images(2, 3, 12, 12)


def _norm_between() -> M.Module:
    def forward(self, x):
        return self.last(self.bn(F.relu(self.first(x))))

    return net(forward, first=M.Conv2d(3, 8, 3), bn=M.BatchNorm2d(8), last=M.Conv2d(8, 4, 3))


def _scaled_between() -> M.Module:
    def forward(self, x):
        x = F.relu(self.first(x))
        return self.last(x * self.gain + 0.25)

    gain = np.linspace(0.2, 3, 8, dtype=np.float32).reshape(1, 8, 1, 1)
    return net(forward, first=M.Conv2d(3, 8, 3), gain=Parameter(gain), last=M.Conv2d(8, 4, 3))


def _pools_and_joins() -> M.Module:
    def forward(self, x):
        x = F.relu(self.first(x))
        y = F.concat([F.max_pool2d(x, 3, 1, 1), self.second(x)], axis=1)
        return self.last(y) + F.avg_pool2d(F.relu(y[:, 8:] * 1.0), 3, 1, 1)

    layers = {"first": M.Conv2d(3, 8, 3), "second": M.Conv2d(8, 4, 1), "last": M.Conv2d(12, 4, 1)}
    return net(forward, **layers)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", [_norm_between, _scaled_between, _pools_and_joins])
@pytest.mark.parametrize("recipe", ["backend/openvino", "backend/onnxruntime"])
def test_a_right_file_passes(model, recipe: str, tmp_path: Path) -> None:
    prepared = qtrace.prepare(qtrace.trace(randomize(model()), X, check=False), recipe)
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, [images(2, 3, 12, 12, seed=4)], runtime="openvino")
    assert report.worst_lsb() <= 1, report.table()
    assert report.passed, report.table()
    assert qtrace.bisect(path, converted, [X], runtime="openvino") is None


def test_reductions_keep_their_axes(tmp_path: Path) -> None:
    def forward(self, x):
        both = F.logsumexp(x, (2, 3)), F.logsumexp(x, 1, keepdims=True)
        return (*both, F.logsoftmax(x, (1, 2)), F.norm(x, 1, 1))

    traced = qtrace.trace(net(forward), X, check=False)
    path = qtrace.export(traced, tmp_path / "m.onnx")
    report = qtrace.verify(path, traced, [X], runtime="openvino")
    assert report.passed, report.table()


def test_the_logarithm_of_a_sum_takes_infinities(tmp_path: Path) -> None:
    path = qtrace.export(qtrace.trace(lambda x: F.logsumexp(x, 1), X, check=False), tmp_path / "m.onnx")
    x = X.copy()
    x[0, :, 0, 0], x[0, 0, 0, 1] = -np.inf, np.inf
    (y,) = ort.InferenceSession(str(path)).run(None, {"x": x})
    assert y[0, 0, 0] == -np.inf
    assert y[0, 0, 1] == np.inf
    assert np.isfinite(y).sum() == y.size - 2


@pytest.mark.quick(1)
@pytest.mark.parametrize("lowered", [True, False])
def test_a_processor_with_bfloat16_needs_a_setting(monkeypatch: Any, tmp_path: Path, lowered: bool) -> None:
    compiled, opened = [], worker.Openvino.__init__

    def init(self: Any, request: Any, arrays: Any) -> None:
        opened(self, request, arrays)
        compiled.append(self.compiled.get_property("INFERENCE_PRECISION_HINT").to_string())
        assert self.facts["bfloat16"] == (
            "BF16" in self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        )
        self.facts["bfloat16"] = lowered

    monkeypatch.setattr(worker.Openvino, "__init__", init)
    prepared = qtrace.prepare(qtrace.trace(randomize(_norm_between()), X, check=False), "backend/openvino")
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    report = qtrace.verify(qtrace.export(converted, tmp_path / "m.onnx"), converted, [X])
    assert report.passed
    assert set(compiled) == {"f32"}
    assert (BFLOAT16 in report.remarks(), BFLOAT16 in report.summary()) == (lowered, lowered)
    whole = np.concatenate([X] * 4)
    result = qtrace.quantize(_norm_between(), whole, tmp_path / "q.onnx", target="openvino", measure=False)
    assert (f"  {BFLOAT16}" in result.summary()) is lowered


def _model(axis: int | None, kind: int) -> onnx.ModelProto:
    """QuantizeLinear, MaxPool on integers, DequantizeLinear; a weight per channel; a bias of int32."""
    rng = np.random.default_rng(0)
    channel = (4,) if axis is not None else ()
    integer = helper.tensor_dtype_to_np_dtype(kind)
    stored = {
        "s": rng.uniform(0.01, 0.02, channel).astype(np.float32),
        "z": np.full(channel, 3, integer),
        "w": rng.integers(-127, 128, (4, 4, 1, 1)).astype(np.int8),
        "ws": rng.uniform(0.01, 0.02, 4).astype(np.float32),
        "wz": np.zeros(4, np.int8),
        "b": rng.integers(-(2**29), 2**29, 4).astype(np.int32),
        "bs": np.full(4, 1e-9, np.float32),
    }
    where = {} if axis is None else {"axis": axis}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **where),
        helper.make_node("MaxPool", ["q"], ["p"], kernel_shape=[2, 2]),
        helper.make_node("DequantizeLinear", ["p", "s", "z"], ["d"], **where),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        helper.make_node("DequantizeLinear", ["b", "bs"], ["bd"], axis=0),
        helper.make_node("Conv", ["d", "wd", "bd"], ["y"]),
    ]
    outputs = [helper.make_tensor_value_info(n, k, None) for n, k in (("y", TensorProto.FLOAT), ("q", kind))]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 4, 6, 6))]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@each_of("kind", [TensorProto.UINT8, TensorProto.INT8])
@each_of("axis", [None, 1, -3])
def test_spelled_out_roundings_are_the_same_numbers(axis: int | None, kind: int) -> None:
    x = np.random.default_rng(1).normal(size=(2, 4, 6, 6)).astype(np.float32) * 2
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = _model(axis, kind)
    y, q = ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})
    for node in (n for n in model.graph.node if "Linear" in n.op_type):
        node.attribute.append(helper.make_attribute("block_size", 0))  # no blocks, as without it
    spell_out_roundings(model)
    assert not [n.op_type for n in model.graph.node if "Linear" in n.op_type]
    spelled, integers = ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})
    np.testing.assert_array_equal(integers, q.astype(np.float32))
    np.testing.assert_array_equal(spelled, y)


@pytest.mark.parametrize("forward", [lambda self, x, z: self.conv(x), lambda self, z, x: self.conv(x) + 1])
def test_an_input_that_nothing_reads_is_no_input_of_a_compiled_model(forward, tmp_path: Path) -> None:
    x, z = images(1, 3, 6, 6, seed=2), images(1, 2, 4, 4, seed=3)
    batch = (x, z) if forward.__code__.co_varnames[1] == "x" else (z, x)
    traced = qtrace.trace(randomize(net(forward, conv=M.Conv2d(3, 4, 1)), 0), *batch, check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, {"backend": "openvino"}), [batch], progress=False)
    converted, file = qtrace.convert(prepared), tmp_path / "net.onnx"
    qtrace.export(converted, file)
    assert qtrace.verify(file, converted, [batch], runtime="openvino", min_equal=0.98).passed


def test_helper_tensors_take_names_that_the_model_has_not() -> None:
    """A model whose own tensors are called as the scale, zero point and bounds of a rounding might be."""
    taken = [f"x_int_{end}" for end in ("s", "z", "low", "high", "scaled", "rounded", "shifted")]
    dequantized = ["x_dq_s", "x_dq_z", "x_dq_centered"]
    names = [*taken, *dequantized]
    constants = {name: np.float32(index + 1) for index, name in enumerate(names[:4] + dequantized[:2])}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["x_int"]),
        helper.make_node("DequantizeLinear", ["x_int", "scale", "zero"], ["x_dq"]),
    ]
    last = "x_dq"
    for name in names:  # each of these tensors adds to the result
        if name in constants:
            nodes.append(helper.make_node("Add", [last, name], [f"{name}_sum"]))
            last = f"{name}_sum"
        else:
            nodes.append(helper.make_node("Add", [last, "one"], [name]))
            last = name
    value = helper.make_tensor_value_info
    stored = {"scale": np.float32(0.1), "zero": np.uint8(7), "one": np.float32(1), **constants}
    graph = helper.make_graph(
        nodes,
        "clash",
        [value("x", TensorProto.FLOAT, (2, 3))],
        [value(last, TensorProto.FLOAT, (2, 3))],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    x = np.linspace(-1, 30, 6, dtype=np.float32).reshape(2, 3)
    expected = _computed(model, x)
    spell_out_roundings(model)
    onnx.checker.check_model(model)
    np.testing.assert_allclose(_computed(model, x), expected, rtol=1e-6)


def _computed(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]
