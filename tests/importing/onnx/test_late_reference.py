"""ONNX's reference implementation, which loads slowly, is loaded for files that need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper


def _saved(stored: bool, path: Path) -> str:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in ("x", "y")]
    number = helper.make_tensor("c", TensorProto.FLOAT, [1], [4.0])
    root = [helper.make_node("Sqrt", ["c"], ["r"])] if stored else []
    nodes = [*root, helper.make_node("Mul", ["x", "r" if stored else "c"], ["y"])]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [number])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return str(path)


def test_the_reference_is_loaded_to_compute_what_is_stored(tmp_path: Path) -> None:
    paths = [_saved(stored, tmp_path / f"{stored}.onnx") for stored in (False, True)]
    code = (
        "import sys, numpy as np, qtrace\n"
        "for path in sys.argv[1:]:\n"
        "    traced = qtrace.from_onnx(path)\n"
        "    import megengine as mge\n"
        "    value = traced(mge.Tensor(np.ones((1, 2), 'float32'))).numpy()[0, 0]\n"
        "    print(value, 'onnx.reference' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["4.0 False", "2.0 True"]
