"""Files of PyTorch's exporters: their paths name layers and exprs, their lines stand in refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from megengine import Tensor
from onnx.reference import ReferenceEvaluator

import qtrace
from qtrace.errors import ImportingError
from qtrace.importing.onnx.naming import undoubled
from tests.each import each_of
from tests.importing.onnx.networks import model, node, save, weights

X = weights(2, 3, 8, 8, seed=5)


def _scoped(proto: onnx.NodeProto, scopes: list[str], line: int = 0) -> onnx.NodeProto:
    """Adds what PyTorch's exporter says of a node."""
    pairs = {"pkg.torch.onnx.name_scopes": repr(scopes)}
    if line:
        pairs["pkg.torch.onnx.stack_trace"] = (
            f'File "/home/me/net.py", line {line}, in forward\n    return self.conv(x)\n'
            '  File "/lib/torch/nn/modules/conv.py", line 565, in forward\n    return self._conv_forward(x)'
        )
    proto.metadata_props.extend(onnx.StringStringEntryProto(key=k, value=v) for k, v in pairs.items())
    return proto


def _block() -> onnx.ModelProto:
    """A block whose scopes are those that torch.onnx.export(dynamo=True) writes."""
    inner = ["", "layer1", "layer1.0"]
    nodes = [
        _scoped(
            node("Conv", "x layer1.0.conv.weight zeros", "conv2d", pads=[1] * 4),
            [*inner, "layer1.0.conv", "conv2d"],
        ),
        _scoped(node("Relu", "conv2d", "relu"), [*inner, "layer1.0.relu", "relu"]),
        _scoped(node("Add", "relu x", "add_3"), [*inner, "add_3"]),
        _scoped(node("Mul", "add_3 two", "mul_7"), [*inner, "mul_7"]),
        _scoped(node("ReduceMean", "mul_7", "mean", axes=[2, 3], keepdims=0), ["", "mean"]),
        _scoped(node("Transpose", "fc.weight", "val_5", perm=[1, 0]), ["", "fc", "linear"]),
        _scoped(node("MatMul", "mean val_5", "val_6"), ["", "fc", "linear"]),
        _scoped(node("Add", "val_6 fc.bias", "linear"), ["", "fc", "linear"]),
    ]
    nodes.insert(0, node("ConstantOfShape", "three", "zeros"))
    stored = {
        "layer1.0.conv.weight": weights(3, 3, 3, 3),
        "three": np.array([3], np.int64),
        "two": np.array(2, np.float32),
        "fc.weight": weights(4, 3),
        "fc.bias": weights(4),
    }
    return model(nodes, {"x": ["N", 3, 8, 8]}, ["linear"], stored)


def test_exprs_and_layers_are_named_by_their_modules(tmp_path: Path) -> None:
    path = save(_block(), tmp_path)
    traced = qtrace.from_onnx(path, {"x": (2, 3, 8, 8)})
    names = {expr.outputs[0].name for expr in traced.graph._exprs if expr.outputs}
    assert names >= {"layer1_0_conv_1", "layer1_0_relu", "layer1_0_add", "layer1_0_mul", "mean", "fc_1"}
    assert set(dict(traced.named_parameters())) == {"layer1.0.conv.weight", "fc.weight", "fc.bias"}
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"x": X})
    np.testing.assert_allclose(traced(Tensor(X)).numpy(), expected, atol=1e-5)


def test_the_export_gives_the_names_of_the_file_back(tmp_path: Path) -> None:
    traced = qtrace.from_onnx(save(_block(), tmp_path), {"x": (2, 3, 8, 8)})
    prepared = qtrace.prepare(traced)
    qtrace.calibrate(prepared, [X], progress=False)
    qtrace.export(qtrace.convert(prepared), tmp_path / "out.onnx")
    written = onnx.load(tmp_path / "out.onnx")
    assert "add_3" in {name for part in written.graph.node for name in part.output}


@each_of("text", ["[", "['a']", "7", "[1, 2]", "[" * 3000, "['a', 'b']" + " " * 5000])
def test_scopes_that_are_none_are_left_alone(text: str, tmp_path: Path) -> None:
    relu = node("Relu", "x", "y")
    relu.metadata_props.append(onnx.StringStringEntryProto(key="pkg.torch.onnx.name_scopes", value=text))
    traced = qtrace.from_onnx(save(model([relu], {"x": (1, 3)}), tmp_path))
    assert traced.graph.outputs[0].name == "y"


def test_refusals_name_the_line_of_the_source(tmp_path: Path) -> None:
    unknown = _scoped(node("NonZero", "x", "places"), ["", "find", "nonzero"], line=12)
    unknown.domain = "own"
    proto = model([unknown], {"x": (1, 3)}, ["places"])
    proto.opset_import.add(domain="own", version=1)
    with pytest.raises(ImportingError, match=r"own\.NonZero 'places' \(/home/me/net\.py:12\)"):
        qtrace.from_onnx(save(proto, tmp_path))


@each_of(
    ("name", "expected"),
    [
        ("/layer4/layer4.1/conv1/Conv", "/layer4.1/conv1/Conv"),
        ("/features/features.0/features.0.0/Conv", "/features.0.0/Conv"),
        ("/head/head/Gemm", "/head/head/Gemm"),
        ("/a/ab.1/Conv", "/a/ab.1/Conv"),
        ("Conv_12", "Conv_12"),
    ],
)
def test_doubled_paths(name: str, expected: str) -> None:
    assert undoubled(name) == expected


def test_names_of_the_older_torch_exporter_are_not_doubled(tmp_path: Path) -> None:
    nodes = [
        node(
            "Conv",
            "x onnx::Conv_12",
            "/layer4/layer4.1/conv1/Conv_output_0",
            name="/layer4/layer4.1/conv1/Conv",
        ),
        node("Relu", "/layer4/layer4.1/conv1/Conv_output_0", "y", name="/layer4/layer4.1/Relu"),
    ]
    proto = model(nodes, {"x": (2, 3, 8, 8)}, ["y"], {"onnx::Conv_12": weights(4, 3, 1, 1)})
    traced = qtrace.from_onnx(save(proto, tmp_path))
    assert type(traced.layer4._1.conv1 if hasattr(traced.layer4, "_1") else getattr(traced.layer4, "1").conv1)
    assert "layer4.1.conv1.weight" in dict(traced.named_parameters())
