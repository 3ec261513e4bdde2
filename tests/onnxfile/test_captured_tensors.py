"""A tensor that a body reads of the graph around it is read: passes over the nodes keep it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from qtrace.export.onnx.cures import UnsignedWeights, write_fast_poolings
from qtrace.extras.contracts.qdq_graph import QdqGraph
from qtrace.extras.parameters.onnx_float import _name_parameters
from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.model import OnnxEditor, bodies_of
from qtrace.onnxfile.sessions import open_session

SCALE = {"scale": np.float32(0.1), "zero": np.uint8(0)}


def _branches(captured: str, constant: str) -> NodeProto:
    bodies = {}
    for name, op in (("then_branch", "Mul"), ("else_branch", "Add")):
        result = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
        bodies[name] = helper.make_graph(
            [helper.make_node(op, [captured, constant], ["r"])], name, [], [result]
        )
    return helper.make_node("If", ["yes"], ["y"], **bodies)


def _model(nodes: list[NodeProto], constants: dict[str, Any]) -> ModelProto:
    stored = {"yes": np.array(True), "k": np.full((1, 1, 1, 1), 3, np.float32), **constants}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 2, 7, 7))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def _run(model: ModelProto) -> np.ndarray:
    x = np.random.default_rng(0).random((1, 2, 7, 7), np.float32)
    session = open_session(model.SerializeToString(), SessionSettings(optimize=False))
    return session.run(None, {"x": x})[0]


def _padded_pool(behind: list[NodeProto]) -> ModelProto:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Pad", ["a", "pads", "low"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
    ]
    pads = np.array([0, 0, 0, 0, 0, 0, 1, 1])
    return _model([*nodes, *behind], {"pads": pads, "low": np.finfo(np.float32).min, **SCALE})


def test_a_changed_pooling_keeps_what_a_body_reads() -> None:
    model = _padded_pool([_branches("p", "k")])
    expected = _run(model)
    assert write_fast_poolings(model) == 1
    np.testing.assert_array_equal(_run(model), expected)


def test_an_editor_writes_once_and_keeps_what_a_body_reads() -> None:
    model = _padded_pool([_branches("p", "k")])
    expected = _run(model)
    editor = OnnxEditor(model)
    relu, pad, pool, _ = editor.nodes()
    assert editor.insert("a", [pad], "LeakyRelu", "", alpha=1.0) == "a_1"
    assert editor.rename_result(pool, "_max") == ("p", "p_max")
    editor.add_after(pool, helper.make_node("Identity", ["p_max"], ["p"]))
    editor.replace(relu, helper.make_node("Neg", ["x"], ["n"]), relu)
    assert [node.op_type for node in model.graph.node] == ["Relu", "Pad", "MaxPool", "If"]
    assert editor.store("k", np.float32(2)) == "k_1"
    editor.drop_unread("Relu")
    assert [node.op_type for node in editor.nodes("Neg", "Relu")] == ["Neg", "Relu"]
    editor.drop_unread()
    editor.finish()
    kinds = [node.op_type for node in model.graph.node]
    assert kinds == ["Relu", "LeakyRelu", "Pad", "MaxPool", "Identity", "If"]
    assert {"k", "yes"} <= {tensor.name for tensor in model.graph.initializer}
    assert "k_1" not in {tensor.name for tensor in model.graph.initializer}
    np.testing.assert_array_equal(_run(model), expected)


def test_a_padding_that_a_body_reads_stays() -> None:
    """The pooling is not its only reader."""
    branches = _branches("b", "k")
    model = _padded_pool([branches])
    assert write_fast_poolings(model) == 0


def test_a_pooling_that_a_body_reads_unrounded_is_not_moved() -> None:
    rounding = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("QuantizeLinear", ["a", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("MaxPool", ["d"], ["p"], kernel_shape=[2, 2]),
        helper.make_node("QuantizeLinear", ["p", "scale", "zero"], ["pq"]),
        helper.make_node("DequantizeLinear", ["pq", "scale", "zero"], ["pd"]),
        _branches("p", "pd"),
    ]
    model = _model(rounding, SCALE)
    expected = _run(model)
    write_fast_poolings(model)
    np.testing.assert_array_equal(_run(model), expected)


def test_a_repair_keeps_and_orders_what_a_body_reads() -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
    ]
    model = _model([*nodes, _branches("d", "k")], SCALE)
    expected = _run(model)
    model = _model([_branches("d", "k"), *nodes], SCALE)
    QdqGraph(model).finish()
    np.testing.assert_array_equal(_run(model), expected)


def test_integers_that_a_body_reads_are_no_weight_alone() -> None:
    """A weight is changed to uint8 only where nothing but its DequantizeLinear reads the integers."""
    result = helper.make_tensor_value_info("r", TensorProto.INT8, None)
    body = helper.make_graph([helper.make_node("Identity", ["w"], ["r"])], "b", [], [result])
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale", "zero8"], ["wd"]),
        helper.make_node("Conv", ["x", "wd"], ["c"]),
        helper.make_node("If", ["yes"], ["i"], then_branch=body, else_branch=body),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["c", "f"], ["y"]),
    ]
    model = _model(nodes, {**SCALE, "w": np.full((1, 2, 1, 1), -5, np.int8), "zero8": np.int8(0)})
    assert UnsignedWeights(model).write() == 0


def test_a_parameter_is_renamed_in_bodies() -> None:
    model = _model([_branches("x", "fc_linear")], {"fc_linear": np.ones(7, np.float32)})
    expected = _run(model)
    call = SimpleNamespace(weight=SimpleNamespace(name="fc"), bias=None, kind="linear")
    _name_parameters(SimpleNamespace(ops=[SimpleNamespace(call=call)]), model)  # type: ignore[arg-type]
    assert "fc" in {tensor.name for tensor in model.graph.initializer}
    np.testing.assert_array_equal(_run(model), expected)


@pytest.mark.parametrize("name", ["k", "x"])
def test_captured_tensors_have_readers(name: str) -> None:
    graph = QdqGraph(_model([_branches("x", "k")], {}))
    assert [node.op_type for node in graph.readers[name]] == ["If"]


def test_bodies_are_found_in_attributes_without_a_type() -> None:
    """Files of IR version 1 do not write it."""
    node = NodeProto(op_type="Custom")
    node.attribute.add(name="parts").graphs.add(name="body")
    assert [body.name for body in bodies_of(node)] == ["body"]
