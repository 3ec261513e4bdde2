"""Inputs that an ONNX file stores a value of, which a caller may leave out."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qtrace


def _write(path: Path, names: list[str], ir_version: int = 8) -> Path:
    """Writes ``x`` times stored numbers, those of ``names`` as inputs of the graph, too."""
    stored, nodes, last = [], [], "x"
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])]
    for name in ("a", "b", "c", "d"):
        stored.append(numpy_helper.from_array(np.full([1], 2.0, np.float32), name))
        nodes.append(helper.make_node("Mul", [last, name], [f"y{name}"]))
        last = f"y{name}"
        if name in names:
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]))
    outputs = [helper.make_tensor_value_info(last, TensorProto.FLOAT, [1, 4])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, ir_version=ir_version, opset_imports=opsets), path)
    return path


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["b"], "input 'b' has a default value, which the network keeps: it is an input no longer"),
        (
            ["a", "b"],
            "inputs 'a', 'b' have default values, which the network keeps: they are inputs no longer",
        ),
        (["a", "b", "c", "d"], "inputs 'a', 'b', 'c', 'd' have default values"),
    ],
)
def test_inputs_with_default_values_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: list[str], words: str
) -> None:
    path = _write(tmp_path / "n.onnx", names)
    with caplog.at_level(logging.WARNING, logger="qtrace"):
        traced = qtrace.from_onnx(path)
    assert [record.getMessage() for record in caplog.records if words in record.getMessage()]
    assert len(traced.graph.inputs) == 2  # the module itself, and x


@pytest.mark.parametrize(("names", "ir_version"), [([], 8), (["a", "b", "c", "d"], 3)])
def test_stored_values_that_no_caller_can_replace_are_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: list[str], ir_version: int
) -> None:
    with caplog.at_level(logging.WARNING, logger="qtrace"):
        qtrace.from_onnx(_write(tmp_path / "n.onnx", names, ir_version))
    assert "default" not in caplog.text


def test_settings_are_reported_apart_from_weights_and_from_what_is_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="qtrace"):
        qtrace.from_onnx(_write(tmp_path / "n.onnx", ["c"]), outputs=["yb"])
    assert "default" not in caplog.text  # nothing reads it any more
    model = onnx.load(tmp_path / "n.onnx")
    model.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 4]))
    model.graph.node.append(helper.make_node("MatMul", ["yd", "w"], ["z"]))
    model.graph.output[0].name = "z"
    onnx.save(model, tmp_path / "w.onnx")
    with caplog.at_level(logging.WARNING, logger="qtrace"):
        qtrace.from_onnx(tmp_path / "w.onnx")
    assert "default" not in caplog.text  # an exporter that lists all that is stored
