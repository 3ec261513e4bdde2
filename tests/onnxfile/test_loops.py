"""All loops of a file have one limit, as values may let them run for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from qtrace.errors import ExportError
from qtrace.onnxfile import model
from qtrace.onnxfile.sessions import open_session

_node = helper.make_node
_float = TensorProto.FLOAT


def _info(name: str, kind: int = _float) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, [] if kind != _float else [2])


def _loop(name: str, read: str, nodes: list[NodeProto], times: str) -> NodeProto:
    """A loop that adds what ``nodes`` compute of its state to the state."""
    inputs = [
        _info(f"{name}_i", TensorProto.INT64),
        _info(f"{name}_on", TensorProto.BOOL),
        _info(f"{name}_in"),
    ]
    steps = [*nodes, _node("Identity", [f"{name}_on"], [f"{name}_go"])]
    outputs = [_info(f"{name}_go", TensorProto.BOOL), _info(f"{name}_out")]
    body = helper.make_graph(steps, name, inputs, outputs)
    return _node("Loop", [times, "yes", read], [name], body=body)


def _branch(name: str, nodes: list[NodeProto]) -> GraphProto:
    return helper.make_graph(nodes, name, [], [_info(nodes[-1].output[0])])


def _save(path: Path, times: int) -> Path:
    inner = _loop("inner", "outer_in", [_node("Add", ["inner_in", "one"], ["inner_out"])], "times")
    outer = _loop("outer", "x", [inner, _node("Identity", ["inner"], ["outer_out"])], "times")
    later = _loop("later", "outer", [_node("Add", ["later_in", "one"], ["later_out"])], "times")
    taken = _branch("taken", [later, _node("Mul", ["later", "one"], ["a"])])
    choice = _node(
        "If", ["yes"], ["y"], then_branch=taken, else_branch=_branch("other", [_node("Neg", ["x"], ["b"])])
    )
    stored = {"yes": np.array(True), "one": np.float32(1), "times": np.array(times)}
    graph = helper.make_graph(
        [outer, choice],
        "g",
        [_info("x")],
        [_info("y")],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("times", [3, 4])
def test_nested_loops_and_loops_of_branches_share_one_limit(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "MAX_NODES", 3 * 3 + 3 + 3 + 1)
    session = open_session(model.read_ending(_save(tmp_path / "net.onnx", times)))
    x = np.zeros(2, np.float32)
    if times == 3:
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x + 12)
        return
    with pytest.raises(ExportError) as failure:
        session.run(None, {"x": x})
    assert model.limit_reached(failure.value) == "its loops run more than 16 times"
