"""A runtime that computes the float network wrong, too, is named; a wrong file is not excused by that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule

_FAULT = "the runtime is wrong, not the file: openvino differs from onnxruntime in the float network, too"
_RANDOM = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return _RANDOM.normal(size=shape, scale=0.3).astype(np.float32)


def _write(path: Path, nodes: list[Any], inputs: list[Any], stored: dict[str, np.ndarray], opset=17) -> Path:
    tensors = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, path)
    return path


def _input(name: str, shape: Any, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def _recurrent(path: Path, op: str, gates: int) -> Path:
    """A recurrent layer for sequences of several lengths, which OpenVINO ignores if the batch is open."""
    nodes = [
        helper.make_node("MatMul", ["x", "p"], ["a"]),
        helper.make_node(op, ["a", "w", "r", "", "lengths"], ["s"], hidden_size=8),
        helper.make_node("Squeeze", ["s", "axis"], ["b"]),
        helper.make_node("MatMul", ["b", "q"], ["y"]),
    ]
    stored = {"w": _normal(1, gates * 8, 6), "r": _normal(1, gates * 8, 8), "p": _normal(6, 6)}
    stored.update(q=_normal(8, 4), axis=np.array([1]))
    inputs = [_input("x", [5, "n", 6]), _input("lengths", ["n"], TensorProto.INT32)]
    return _write(path, nodes, inputs, stored)


def _sequences() -> tuple[np.ndarray, np.ndarray]:
    return _normal(5, 4, 6), np.array([5, 3, 1, 4], np.int32)


def _quantized(source: Path, batch: Any, shapes: Any = None) -> TracedModule:
    config = qtrace.load_recipe("backend/openvino").without_placement()
    prepared = qtrace.prepare(qtrace.from_onnx(source, shapes=shapes), config)
    return qtrace.convert(qtrace.calibrate(prepared, [batch], progress=False))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3)])
def test_verify_and_bisect_name_a_runtime_that_is_wrong_in_float(op: str, gates: int, tmp_path: Path) -> None:
    source, batch = _recurrent(tmp_path / "source.onnx", op, gates), _sequences()
    converted = _quantized(source, batch, {"x": batch[0].shape, "lengths": batch[1].shape})
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(path, converted, [batch], runtime="onnxruntime").passed
    report = qtrace.verify(path, converted, [batch])
    assert not report.passed
    assert _FAULT in report.summary()
    assert "either side" not in report.summary()
    difference = qtrace.bisect(path, converted, [batch])
    assert difference is not None
    assert difference.check.side == "float"
    assert difference.causes == ("the runtime, which computes the float network wrong, too",)


def test_the_one_call_names_the_runtime(tmp_path: Path) -> None:
    source = _recurrent(tmp_path / "source.onnx", "LSTM", 4)
    with pytest.raises(ExportError, match=_FAULT):
        qtrace.quantize(
            source,
            [_sequences() for _ in range(8)],
            tmp_path / "q.onnx",
            target="openvino",
            measure=False,
            progress=False,
        )


def test_a_refusal_of_the_float_network_is_the_runtimes_fault(tmp_path: Path) -> None:
    body = helper.make_graph(
        [
            helper.make_node("Gather", ["c", "i"], ["one"], axis=0),
            helper.make_node("Unsqueeze", ["one", "axis"], ["sample"]),
            helper.make_node("Conv", ["sample", "v"], ["d"]),
            helper.make_node("Add", ["d", "s"], ["s2"]),
            helper.make_node("ReduceMax", ["s2"], ["largest"], keepdims=0),
            helper.make_node("Less", ["largest", "limit"], ["go2"]),
        ],
        "body",
        [_input("i", [], TensorProto.INT64), _input("go", [], TensorProto.BOOL), _input("s", None)],
        [_input("go2", [], TensorProto.BOOL), _input("s2", None)],
    )
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Loop", ["count", "always", "c"], ["y"], body=body),
    ]
    stored = {"w": _normal(8, 3, 3, 3), "v": _normal(8, 8, 1, 1), "axis": np.array([0])}
    stored.update(count=np.array(1), always=np.array(True), limit=np.array(9, np.float32))
    source = _write(tmp_path / "source.onnx", nodes, [_input("x", ["n", 3, 8, 8])], stored)
    batch = _normal(2, 3, 8, 8)
    converted = _quantized(source, batch)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    for check in (qtrace.verify, qtrace.bisect):
        with pytest.raises(ExportError, match=r"m.onnx: openvino is at fault, not the file: it refuses the"):
            check(path, converted, [batch])


def test_other_shapes_in_float_are_the_runtimes_fault(tmp_path: Path) -> None:
    nodes = [helper.make_node("ReduceL1", ["x"], ["y"], axes=[2, 3])]  # OpenVINO reads no axes here
    source = _write(tmp_path / "source.onnx", nodes, [_input("x", ["n", 3, 8, 8])], {}, opset=13)
    traced = qtrace.from_onnx(source)
    with pytest.raises(ExportError, match=r"openvino is at fault, .* \(1, 1, 1, 1\) there, and \(2, 3, "):
        qtrace.verify(source, traced, [_normal(2, 3, 8, 8)], runtime="openvino")


def test_a_wrong_file_stays_the_files_fault(tmp_path: Path) -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"])]
    source = _write(
        tmp_path / "source.onnx", nodes, [_input("x", ["n", 3, 8, 8])], {"w": _normal(4, 3, 3, 3)}
    )
    batch = _normal(2, 3, 8, 8)
    converted = _quantized(source, batch)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    model = onnx.load(path)
    weight = next(t for t in model.graph.initializer if t.data_type == TensorProto.INT8 and len(t.dims) == 4)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[::-1].copy(), weight.name))
    onnx.save(model, path)
    report = qtrace.verify(path, converted, [batch])
    assert report.cross_check is not None
    assert report.cross_check[1].side == "runtime", report.summary()
    difference = qtrace.bisect(path, converted, [batch])
    assert difference is not None
    assert difference.check.side == "runtime"


def test_a_kept_node_that_breaks_ties_another_way_is_reported_and_written(tmp_path: Path) -> None:
    """Half of what a resize by 0.5 averages are means of integers, whose ties runtimes break by chance."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        helper.make_node("Clip", ["c", "low", "high"], ["v"]),
        helper.make_node("Resize", ["v", "", "half"], ["z"], mode="linear"),
        helper.make_node("Relu", ["z"], ["r"]),
        helper.make_node("Conv", ["r", "u"], ["y"]),
    ]
    stored = {"w": _normal(8, 3, 3, 3) * 2, "u": _normal(4, 8, 3, 3), "low": np.float32(0)}
    stored.update(high=np.float32(1.1), half=np.array([1, 1, 0.5, 0.5], np.float32))
    source = _write(tmp_path / "source.onnx", nodes, [_input("x", ["n", 3, "h", "w"])], stored, opset=18)
    config = {"backend": "openvino", "placement": "everything", "observers": {"activation": "minmax"}}
    data = np.random.default_rng(1).normal(size=(16, 3, 16, 16)).astype(np.float32)
    result = qtrace.quantize(
        source,
        data,
        tmp_path / "q.onnx",
        recipe=config,
        measure=False,
        progress=False,
        shapes={"x": (1, 3, 16, 16)},
    )
    assert result.verify is not None
    tallies = result.verify.sites["op_by_op"]
    (opaque,) = result.verify.inexact
    assert (tallies[opaque].worst, min(t.equal / t.values for t in tallies.values()) < 0.999) == (1, True)
    assert all(t.equal > 0.999 * t.values for name, t in tallies.items() if name != opaque)
    assert " integers differ from the graph's, by 1 LSB at most" in str(result)
