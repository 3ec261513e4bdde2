"""Kernels of MegEngine that refuse a view: an import copies it first, and a file has no op for the copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from megengine import Tensor
from onnx import TensorProto, helper, numpy_helper

import qtrace

_SLICE = helper.make_node("Slice", ["r", "starts", "ends", "axes"], ["s"])
READERS = {
    "AveragePool": helper.make_node("AveragePool", ["s"], ["y"], kernel_shape=[1, 1], strides=[2, 2]),
    "MaxPool": helper.make_node("MaxPool", ["s"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
    "ConvTranspose": helper.make_node("ConvTranspose", ["s", "t"], ["y"], strides=[2, 2]),
    "RoiAlign": helper.make_node(
        "RoiAlign",
        ["s", "rois", "places"],
        ["y"],
        output_height=2,
        output_width=2,
        coordinate_transformation_mode="half_pixel",
    ),
}


def _file(path: Path, reader: onnx.NodeProto) -> Path:
    rng = np.random.default_rng(0)
    stored: dict[str, Any] = {
        "w": rng.normal(size=(8, 3, 3, 3)).astype("float32"),
        "t": rng.normal(size=(8, 4, 2, 2)).astype("float32"),
        "starts": np.array([1, 1]),
        "ends": np.array([2**31 - 1] * 2),
        "axes": np.array([2, 3]),
        "rois": np.array([[0, 0, 9, 9]], "float32"),
        "places": np.array([0]),
    }
    conv = helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1])
    relu = helper.make_node("Relu", ["c"], ["r"])
    used = {name for node in (conv, _SLICE, reader) for name in node.input}
    graph = helper.make_graph(
        [conv, relu, _SLICE, reader],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in stored.items() if name in used],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8), path)
    return path


@pytest.mark.parametrize("reader", READERS)
def test_a_view_is_copied_for_a_kernel_that_refuses_it(tmp_path: Path, reader: str) -> None:
    """NASNet's poolings of images without their first row and column: batch 1 alone was taken."""
    path = _file(tmp_path / "net.onnx", READERS[reader])
    traced = qtrace.from_onnx(path, {"x": (1, 3, 16, 16)})
    x = np.random.default_rng(1).normal(size=(4, 3, 16, 16)).astype("float32")
    expected = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})[0]
    np.testing.assert_allclose(traced(Tensor(x)).numpy(), expected, rtol=1e-4, atol=1e-5)
    out = qtrace.export(traced, tmp_path / "out.onnx")
    kinds = [node.op_type for node in onnx.load(out).graph.node]
    assert "Pad" not in kinds
    np.testing.assert_allclose(
        onnxruntime.InferenceSession(str(out)).run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-5
    )
