"""ONNX's reference implementation, which loads slowly, is loaded for files that need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper


@pytest.mark.parametrize("stored", [False, True])
def test_the_reference_is_loaded_to_compute_what_is_stored(stored: bool, tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in ("x", "y")]
    number = helper.make_tensor("c", TensorProto.FLOAT, [1], [4.0])
    root = [helper.make_node("Sqrt", ["c"], ["r"])] if stored else []
    nodes = [*root, helper.make_node("Mul", ["x", "r" if stored else "c"], ["y"])]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [number])
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    code = (
        "import sys, numpy as np, qtrace; traced = qtrace.from_onnx(sys.argv[1]); import megengine as mge; "
        "print(traced(mge.Tensor(np.ones((1, 2), 'float32'))).numpy()[0, 0], 'onnx.reference' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{2.0 if stored else 4.0}", str(stored)]
