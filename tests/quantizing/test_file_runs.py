"""Files in their runtimes, for their outputs only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from qtrace.quantizing.file_runs import open_runs, run_batch


def test_the_inputs_of_a_file_in_openvino_are_those_of_the_file(tmp_path: Path) -> None:
    """OpenVINO has no port for an input that nothing reads, and takes integers as the file declares them."""
    kinds = {"unread": TensorProto.FLOAT, "row": TensorProto.INT64, "x": TensorProto.FLOAT}
    shapes = {"unread": ["n", 2], "row": [1], "x": ["n", 3]}
    declared = [helper.make_tensor_value_info(name, kinds[name], shapes[name]) for name in kinds]
    nodes = [helper.make_node("Gather", ["x", "row"], ["y"], axis=1)]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph(nodes, "g", declared, [out]),
        opset_imports=[helper.make_opsetid("", 13)],
        ir_version=8,
    )
    onnx.save(model, tmp_path / "m.onnx")
    runs = open_runs(tmp_path / "m.onnx", None, "openvino")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for count in (2, 1):
        (y,) = run_batch(runs, [x[:count, :2], np.array([2], np.int32), x[:count]])
        assert np.array_equal(y, x[:count, 2:])
