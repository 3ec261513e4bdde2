"""The network of the benchmark of memory: its weights lie beside the file, and it comes in as it is."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import numpy as np
import onnx

import qtrace
from benchmarks.large import Layout, write_network
from qtrace.onnxfile.sessions import open_session


def test_the_large_network_comes_in(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    size = write_network(path, Layout(megabytes=0.1, width=64))
    assert size >= 1e5
    assert path.with_name("net.onnx.data").stat().st_size == size
    assert {n.op_type for n in onnx.load(path).graph.node} == {"MatMul", "Gemm", "Conv", "Relu", "Reshape"}
    x = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    traced = qtrace.from_onnx(path, {"x": (3, 64)})
    (expected,) = open_session(path).run(None, {"x": x})
    np.testing.assert_allclose(traced(mge.Tensor(x)).numpy(), expected, rtol=1e-4, atol=1e-5)
