"""Sessions of onnxruntime: what they say of a model or an input that it refuses, and the optimized model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from qtrace.onnxfile.local_session import SessionError, SessionSettings
from qtrace.onnxfile.sessions import open_session


def _model() -> bytes:
    nodes = [helper.make_node("Identity", ["x"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8
    ).SerializeToString()


def test_a_model_or_an_input_that_is_refused_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(SessionError, match=r"^onnxruntime cannot run .*m\.onnx: [^\n]+\.$"):
        open_session(tmp_path / "m.onnx")
    with pytest.raises(SessionError, match="^onnxruntime cannot run the copy: ") as error:
        open_session(b"no model", subject="the copy")
    assert str(error.value) == f"onnxruntime cannot run the copy: {error.value.reason}."
    with pytest.raises(SessionError, match=r"^onnxruntime refused the input: [^\n]+\.$"):
        open_session(_model()).run(None, {"x": np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    "settings", [SessionSettings(), SessionSettings(False, 1, False, as_megengine=True, spin=False)]
)
def test_every_setting_runs_the_model(settings: SessionSettings) -> None:
    session = open_session(_model(), settings)
    assert [(value.name, value.shape) for value in session.inputs] == [("x", [2])]
    np.testing.assert_array_equal(session.run(["y"], {"x": np.float32([-1, 2])})[0], [0, 2])


def test_the_optimized_model_is_given() -> None:
    session = open_session(_model(), SessionSettings(optimized=True))
    assert len(onnx.load_from_string(session.optimized()).graph.node) == 1


def test_an_output_that_is_an_input_does_not_change_with_the_array_that_was_given() -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value], [out, value])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = open_session(model.SerializeToString(), SessionSettings(), "net")
    for names in (None, ["y", "x"]):
        given = np.ones(4, np.float32)
        passed = session.run(names, {"x": given})[1]
        given[:] = 7
        assert passed.tolist() == [1] * 4
