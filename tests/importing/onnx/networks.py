"""Small ONNX files for tests, each written node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

KINDS = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.float64): TensorProto.DOUBLE,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(bool): TensorProto.BOOL,
}


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node; names are separated by spaces, "_" leaves an input out."""
    names = ["" if name == "_" else name for name in inputs.split()]
    return helper.make_node(op, names, outputs.split(), **attributes)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[int | str | None]],
    outputs: Sequence[str] = ("y",),
    stored: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = 17,
    dtypes: Mapping[str, Any] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    """A model; inputs and outputs are float32 unless ``dtypes`` has their names."""
    kinds = {name: KINDS[np.dtype(dtype)] for name, dtype in (dtypes or {}).items()}
    graph = helper.make_graph(
        list(nodes),
        "net",
        [helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), None) for n in outputs],
        [numpy_helper.from_array(array, name) for name, array in (stored or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(f.domain, 1) for f in functions)]
    return helper.make_model(
        graph, opset_imports=opsets, ir_version=10, functions=list({f.name: f for f in functions}.values())
    )


def save(proto: onnx.ModelProto, folder: Path, name: str = "net.onnx") -> Path:
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def conv_bn() -> onnx.ModelProto:
    """Two convolutions with BatchNorm in a tree of modules, as PyTorch names them; the batch is open."""
    stored = {
        "backbone.stage1.conv.weight": weights(4, 3, 3, 3),
        "backbone.stage1.bn.weight": weights(4) + 2,
        "backbone.stage1.bn.bias": weights(4),
        "backbone.stage1.bn.running_mean": weights(4),
        "backbone.stage1.bn.running_var": np.abs(weights(4)) + 1,
        "onnx::Conv_12": weights(8, 4, 1, 1),
        "onnx::Conv_13": weights(8),
        "head.fc.weight": weights(5, 8),
        "head.fc.bias": weights(5),
    }
    names = ["weight", "bias", "running_mean", "running_var"]
    statistics = " ".join(f"backbone.stage1.bn.{name}" for name in names)
    nodes = [
        node("Conv", "image backbone.stage1.conv.weight", "c", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", f"c {statistics}", "b"),
        node("Relu", "b", "r"),
        node("Conv", "r onnx::Conv_12 onnx::Conv_13", "d", name="/backbone/stage2/conv/Conv"),
        node("GlobalAveragePool", "d", "g"),
        node("Flatten", "g", "f"),
        node("Gemm", "f head.fc.weight head.fc.bias", "scores", transB=1),
    ]
    return model(nodes, {"image": ["batch", 3, 8, 8]}, ["scores"], stored)
