"""Poolings of an ONNX file: their padding is their own, and floats are pooled before they are rounded."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import qtrace
from qtrace.export.onnx.cures import write_fast_poolings
from tests.each import each_of
from tests.nets import images, net


def _run(model: onnx.ModelProto | str, x: np.ndarray) -> np.ndarray:
    source = model if isinstance(model, str) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def _model(nodes: list, constants: dict[str, np.ndarray], shape: tuple[int, ...]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    return model


def _kinds(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("op", "settings"),
    [
        ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
        ("MaxPool", {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 0], "ceil_mode": 1}),
        ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 1, 1]}),
        ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        (
            "AveragePool",
            {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1], "count_include_pad": 1},
        ),
    ],
)
def test_a_pooling_pads_by_itself_in_float_and_on_integers(tmp_path: Path, op, settings) -> None:
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=(8, c, 3, 3)).astype(np.float32) / 5 for n, c in (("v", 3), ("w", 8))}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], pads=[1] * 4),
        helper.make_node(op, ["a"], ["p"], **settings),
        helper.make_node("Conv", ["p", "w"], ["y"], pads=[1] * 4),
    ]
    source, out = tmp_path / "source.onnx", tmp_path / "out.onnx"
    onnx.save(_model(nodes, weights, (1, 3, 12, 12)), source)
    x = rng.normal(size=(4, 3, 12, 12)).astype(np.float32)
    traced = qtrace.from_onnx(source)
    qtrace.export(traced, out)
    assert _kinds(onnx.load(out)) == ["Conv", op, "Conv"]
    np.testing.assert_array_equal(_run(str(out), x[:1]), _run(str(source), x[:1]))
    prepared = qtrace.prepare(traced, {"placement": "everything"})
    qtrace.calibrate(prepared, [x[i : i + 1] for i in range(4)], progress=False)
    converted = qtrace.convert(prepared)
    qtrace.export(converted, out)
    assert "Pad" not in _kinds(onnx.load(out))
    report = qtrace.verify(out, converted, [x[:1]])
    assert report.passed, report.table()


@pytest.mark.parametrize("op", ["LeakyRelu", "Tanh"])
def test_a_file_rounds_behind_a_padded_pooling_of_floats(tmp_path: Path, op) -> None:
    """The site in front of the padding has no integers of its own in the file."""
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=(8, c, 3, 3)).astype(np.float32) / 5 for n, c in (("v", 3), ("w", 8))}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], pads=[1] * 4),
        helper.make_node(op, ["a"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
        helper.make_node("Conv", ["p", "w"], ["y"], pads=[1] * 4),
    ]
    source, out = tmp_path / "source.onnx", tmp_path / "out.onnx"
    onnx.save(_model(nodes, weights, (1, 3, 12, 12)), source)
    x = [rng.normal(size=(1, 3, 12, 12)).astype(np.float32) for _ in range(4)]
    rules = [{"match": {"name": "[ar]"}, "quantize": False}]
    prepared = qtrace.prepare(qtrace.from_onnx(source), {"placement": "everything", "rules": rules})
    qtrace.calibrate(prepared, x, progress=False)
    converted = qtrace.convert(prepared)
    qtrace.export(converted, out)
    kinds = _kinds(onnx.load(out))
    assert kinds.index("QuantizeLinear") > kinds.index("MaxPool")
    report = qtrace.verify(out, converted, x)
    assert report.passed, report.table()


@pytest.mark.parametrize("first", [True, False], ids=["input", "layer"])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("widths", [(0, 0, 1, 1), (2, 0, 1, 3)])
def test_a_convolution_of_integers_pads_by_itself(widths, dilation, first, tmp_path: Path) -> None:
    """As torch's and TensorFlow's SAME padding with a stride has it."""
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=(4, 4, 3, 3)).astype(np.float32) / 5 for n in "vw"}
    weights["widths"] = np.array([0, 0, *widths[:2], 0, 0, *widths[2:]], np.int64)
    settings = {"strides": [2, 2], "pads": [1, 0, 1, 0], "dilations": [dilation] * 2}
    before = [] if first else [helper.make_node("Conv", ["x", "v"], ["a"])]
    nodes = [
        *before,
        helper.make_node("Pad", ["x" if first else "a", "widths"], ["p"]),
        helper.make_node("Conv", ["p", "w"], ["y"], **settings),
    ]
    source, out = tmp_path / "source.onnx", tmp_path / "out.onnx"
    onnx.save(_model(nodes, weights, (1, 4, 12, 14)), source)
    x = rng.normal(size=(2, 4, 12, 14)).astype(np.float32)
    prepared = qtrace.prepare(qtrace.from_onnx(source), {"placement": "everything"})
    converted = qtrace.convert(qtrace.calibrate(prepared, [x[:1], x[1:]], progress=False))
    qtrace.export(converted, out)
    assert "Pad" not in _kinds(onnx.load(out))
    report = qtrace.verify(out, converted, [x[:1]])
    assert report.passed, report.table()


@pytest.mark.parametrize("number", [0.0, -1.0])
def test_a_padding_that_may_win_stays(number) -> None:
    nodes = [
        helper.make_node("Pad", ["x", "widths", "number"], ["a"]),
        helper.make_node("MaxPool", ["a"], ["y"], kernel_shape=[3, 3]),
    ]
    constants = {
        "widths": np.array([0, 0, 0, 0, 0, 0, 1, 1], np.int64),
        "number": np.array(number, np.float32),
    }
    model = _model(nodes, constants, (1, 2, 6, 6))
    assert not write_fast_poolings(model)
    assert _kinds(model) == ["Pad", "MaxPool"]


def _rounded_pool(zero: int, second_zero: int, scale: float = 0.05) -> onnx.ModelProto:
    first, second = ["s", "z"], ["s", "t"]
    nodes = [
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("QuantizeLinear", ["a", *first], ["a_int"]),
        helper.make_node("DequantizeLinear", ["a_int", *first], ["a_dq"]),
        helper.make_node("MaxPool", ["a_dq"], ["p"], kernel_shape=[3, 3], pads=[1] * 4),
        helper.make_node("QuantizeLinear", ["p", *second], ["p_int"]),
        helper.make_node("DequantizeLinear", ["p_int", *second], ["y"]),
    ]
    constants = {"s": np.array(scale, np.float32), "z": np.array(zero, np.uint8)}
    constants["t"] = np.array(second_zero, np.uint8)
    return _model(nodes, constants, (1, 2, 9, 9))


@each_of(("scale", "zero"), [(0.05, 20), (0.004, 128), (0.3, 0)])
def test_floats_are_pooled_before_they_are_rounded_to_the_same_values(scale, zero) -> None:
    x = np.random.default_rng(0).normal(size=(1, 2, 9, 9)).astype(np.float32)
    model = _rounded_pool(zero, zero, scale)
    before = _run(model, x)
    assert write_fast_poolings(model) == 1
    assert _kinds(model) == ["Tanh", "MaxPool", "QuantizeLinear", "DequantizeLinear"]
    np.testing.assert_array_equal(_run(model, x), before)


def _deployed(path: Path, folder: Path) -> list[tuple[str, int]]:
    """Returns the poolings of a file as onnxruntime computes it: their ops, and the types that they read."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # the file is for this machine
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    model = onnx.shape_inference.infer_shapes(onnx.load(options.optimized_model_filepath))
    rounded = {name for node in model.graph.node if node.op_type == "QuantizeLinear" for name in node.output}
    pools = [node for node in model.graph.node if "MaxPool" in node.op_type]
    return [(node.op_type, node.input[0] in rounded) for node in pools]


_POOLS = {
    "3x3, stride 1": {"kernel_size": 3, "stride": 1, "padding": 1},
    "2x2": {"kernel_size": 2, "stride": 2},
    "3x2, stride 2": {"kernel_size": (3, 2), "stride": 2, "padding": (1, 0)},
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("form", ["float", "read by others", "joined", "input", "pooled twice"])
@pytest.mark.parametrize("settings", _POOLS.values(), ids=_POOLS)
def test_onnxruntime_pools_floats_where_no_integer_layer_writes_them(form, settings, tmp_path: Path) -> None:
    """Its kernel for integers in the plain layout takes 20 to 40 times as long."""

    def forward(self, x):
        if form == "input":
            return self.c(F.max_pool2d(x, **settings))
        a = F.relu(self.a(x))
        if form == "joined":
            a = F.concat([a, F.relu(self.b(x))], axis=1)
            return self.d(F.max_pool2d(a, **settings))
        pooled = F.max_pool2d(a, **settings)
        if form == "pooled twice":
            return self.c(pooled) + self.e(F.max_pool2d(pooled, 3, 1, 1))
        if form == "read by others":
            return self.c(pooled).mean((2, 3)) + self.e(a).mean((2, 3))
        return self.c(pooled)

    layers = {n: M.Conv2d(16, 16, 3, padding=1) for n in "abce"} | {"d": M.Conv2d(32, 16, 3)}
    module, x = net(forward, **layers), images(2, 16, 12, 12)
    rules = [{"match": {"name": "a*"}, "quantize": False, "optional": True}]
    config = {"backend": "onnxruntime", "placement": "everything", "rules": rules}
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), config)
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    path = qtrace.export(converted, tmp_path / "net.onnx")
    pools = _deployed(path, tmp_path)
    assert pools
    assert all(op == "MaxPool" and not rounded for op, rounded in pools), pools
    report = qtrace.verify(path, converted, [x])
    assert report.passed, report.table()


def test_a_pooling_that_changes_the_grid_keeps_its_rounding() -> None:
    assert not write_fast_poolings(_rounded_pool(20, 21))


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("activation", [F.relu, F.softplus])
def test_a_file_that_rounds_behind_a_pooling_is_verified(backend: str, activation, tmp_path: Path) -> None:
    """The file lacks the integers before the pooling: those behind it are compared."""
    layers = {"a": M.Conv2d(3, 32, 3), "c": M.Conv2d(32, 8, 3)}
    module = net(lambda self, x: self.c(F.max_pool2d(activation(self.a(x)), 2, 2)), **layers)
    x = images(4, 3, 16, 16)
    config = {"backend": backend, "rules": [{"match": {"name": "a*"}, "quantize": False}]}
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), config)
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    path = qtrace.export(converted, tmp_path / "net.onnx")
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    behind = ["Max", "QuantizeLinear"] if backend == "onnxruntime" else ["QuantizeLinear"]
    assert kinds[kinds.index("MaxPool") + 1 :][: len(behind)] == behind
    assert kinds[kinds.index("MaxPool") - 1] != "DequantizeLinear"
    assert qtrace.verify(path, converted, [x]).passed


def test_a_copy_behind_a_pooling_takes_no_name_of_the_graph(tmp_path: Path) -> None:
    """Pools behind pools, whose results are named as copies would be, and one that other pools read alone."""
    x = images(2, 3, 16, 16)
    weights = {n: np.random.default_rng(1).normal(size=s).astype(np.float32) / 4 for n, s in _SIZES.items()}
    pool = {"kernel_shape": [3, 3], "pads": [1] * 4}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["c"], pads=[1] * 4),
        helper.make_node("Sigmoid", ["c"], ["s"]),
        helper.make_node("Mul", ["c", "s"], ["t"]),
        helper.make_node("MaxPool", ["t"], ["feat"], **pool),
        helper.make_node("MaxPool", ["feat"], ["feat_pooled"], **pool),
        helper.make_node("MaxPool", ["feat_pooled"], ["feat_pooled_pooled"], **pool),
        helper.make_node("Concat", ["t", "feat", "feat_pooled", "feat_pooled_pooled"], ["j"], axis=1),
        helper.make_node("Conv", ["j", "w"], ["y"]),
    ]
    path = tmp_path / "net.onnx"
    onnx.save(_model(nodes, weights, ("N", 3, 16, 16)), path)  # type: ignore[arg-type]
    converted = _converted(qtrace.from_onnx(path, {"x": (2, 3, 16, 16)}), x)
    out = qtrace.export(converted, tmp_path / "out.onnx")
    graph = onnx.load(out).graph
    names = [name for node in graph.node for name in node.output]
    assert len(names) == len(set(names))
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    assert set(names) <= read
    assert qtrace.verify(out, converted, [x]).passed


@pytest.mark.parametrize("opset", [13, 18, 19, 20, 21])
@pytest.mark.parametrize("on_integers", [False, True])
def test_an_average_is_right_where_padding_differs_at_both_ends(
    tmp_path: Path, opset: int, on_integers: bool
) -> None:
    """onnxruntime 1.23 divides wrong from opset 19 on, and merges such a padding itself at 19 and 20."""

    def forward(self, x):
        return self.b(F.avg_pool2d(F.pad(F.relu(self.a(x)), ((0, 0), (0, 0), (0, 1), (0, 1))), 3, 2))

    x = images(2, 3, 10, 11)
    layers = {"a": M.Conv2d(3, 8, 3), "b": M.Conv2d(8, 4, 1)}
    traced = qtrace.trace(net(forward, **layers), x, check=False)
    graph = _converted(traced, x) if on_integers else traced
    path = qtrace.export(graph, tmp_path / "net.onnx", opset=opset)
    assert qtrace.verify(path, graph, [x]).passed


_SIZES = {"v": (4, 3, 3, 3), "w": (4, 16, 1, 1)}


def test_a_copy_that_a_second_pooling_reads_through_is_left_out(tmp_path: Path) -> None:
    layers = {"c": M.Conv2d(3, 3, 3, padding=1)}

    def forward(self, x):
        twice = F.max_pool2d(F.max_pool2d(x, 2, 2), 2, 2)
        return self.c(twice) + F.max_pool2d(self.c(x), 2, 2)[:, :, :1, :1]

    x = images(2, 3, 16, 16)
    converted = _converted(qtrace.trace(net(forward, **layers), x, check=False), x)
    out = qtrace.export(converted, tmp_path / "out.onnx")
    graph = onnx.load(out).graph
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    assert {name for node in graph.node for name in node.output} <= read
    assert qtrace.verify(out, converted, [x]).passed


def _converted(traced, x: np.ndarray):
    prepared = qtrace.prepare(traced, {"placement": "everything", "backend": "onnxruntime"})
    qtrace.calibrate(prepared, [x], progress=False)
    return qtrace.convert(prepared)


def _unpooled() -> tuple[list, dict[str, np.ndarray]]:
    """A convolution, a pooling with places, a convolution, and an unpooling to these places."""
    rng = np.random.default_rng(1)
    shapes = {"v": (8, 3, 3, 3), "w": (8, 8, 3, 3), "u": (4, 8, 3, 3)}
    weights = {name: rng.normal(size=shape).astype(np.float32) / 5 for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["c"], pads=[1] * 4, name="first"),
        helper.make_node("Relu", ["c"], ["a"]),
        helper.make_node("MaxPool", ["a"], ["p", "i"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p", "w"], ["d"], pads=[1] * 4, name="second"),
        helper.make_node("MaxUnpool", ["d", "i"], ["b"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["b", "u"], ["y"], pads=[1] * 4, name="third"),
    ]
    return nodes, weights


@pytest.mark.quick(1)
@pytest.mark.parametrize("in_float", [("conv2d", "relu"), ("conv2d",), ()], ids=str)
def test_places_of_the_largest_values_are_those_of_the_graph(
    tmp_path: Path, in_float: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(0)
    source, out = tmp_path / "source.onnx", tmp_path / "out.onnx"
    onnx.save(_model(*_unpooled(), (4, 3, 16, 16)), source)
    batches = [rng.normal(size=(4, 3, 16, 16)).astype(np.float32) for _ in range(2)]
    names = {"conv2d": "first", "relu": "a"}
    rules = [{"match": {"op": op, "name": names[op]}, "quantize": False} for op in in_float]
    prepared = qtrace.prepare(qtrace.from_onnx(source), {"placement": "everything", "rules": rules})
    qtrace.calibrate(prepared, batches, progress=False)
    converted = qtrace.convert(prepared)
    qtrace.export(converted, out)
    report = qtrace.verify(out, converted, batches)
    assert report.passed, report.table()
