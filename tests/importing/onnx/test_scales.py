"""A learnable scale and shift of one number each stays two parameters, in one op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import qtrace
from qtrace.graph.walk import exprs, op_label
from qtrace.importing.onnx.model import read_graph
from qtrace.importing.onnx.rewriting import find_scales_and_shifts
from tests.each import each_of
from tests.importing.onnx.networks import model, node, save, weights

X = weights(1, 4, 5, 5, seed=3)
STORED = {"conv.weight": weights(4, 4, 1, 1), "lab.scale": np.float32([0.98]), "lab.bias": np.float32([0.01])}


def _net(order: str = "x s", constants: bool = False, **stored: np.ndarray) -> onnx.ModelProto:
    """A convolution, a hard swish in pieces with unnamed numbers, a scale and a shift."""
    values = {**STORED, "const_3": np.float32([3.0]), "const_6": np.float32([6.0]), "const_0": np.float32(0)}
    values |= {key.replace("_", ".", 1): value for key, value in stored.items()}
    names = ("swish lab.scale", "m lab.bias") if order == "x s" else ("lab.scale swish", "lab.bias m")
    nodes = [
        node("Conv", "x conv.weight", "c"),
        node("Add", "c const_3", "a"),
        node("Clip", "a const_0 const_6", "clipped"),
        node("Mul", "c clipped", "p"),
        node("Div", "p const_6", "swish"),
        node("Mul", names[0], "m"),
        node("Add", names[1], "y"),
    ]
    if constants:  # as Paddle writes all its weights
        nodes[:0] = [
            helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))
            for name, array in values.items()
        ]
        values = {}
    values = {
        name: np.reshape(array, () if name == "const_0" else np.shape(array))
        for name, array in values.items()
    }
    return model(nodes, {"x": X.shape}, stored=values)


def _labels(traced: Any) -> list[str]:
    return [label for e in exprs(traced) if (label := op_label(e)) != "getattr"]


@each_of("constants", [False, True])
@each_of("order", ["x s", "s x"])
def test_it_is_one_op_with_the_parameters_of_the_file(tmp_path: Path, order: str, constants: bool) -> None:
    net = qtrace.from_onnx(save(_net(order, constants), tmp_path))
    assert _labels(net) == ["Conv2d", "F.hswish", "qtrace.graph.functions.scale_and_shift"]
    assert {name for name, _ in net.named_parameters()} == set(STORED)
    c = net.conv(mge.Tensor(X)).numpy()
    expected = c * np.clip(c + 3, 0, 6) / 6 * np.float32(0.98) + np.float32(0.01)
    np.testing.assert_allclose(net(mge.Tensor(X)).numpy(), expected, rtol=0, atol=1e-6 * np.abs(c).max())
    again = qtrace.from_onnx(qtrace.export(net, tmp_path / "again.onnx"))
    assert {name for name, _ in again.named_parameters()} == set(STORED)
    assert np.array_equal(again(mge.Tensor(X)).numpy(), net(mge.Tensor(X)).numpy())


def test_a_scale_of_1_and_a_shift_of_0_stay(tmp_path: Path) -> None:
    net = qtrace.from_onnx(save(_net(lab_scale=np.float32([1]), lab_bias=np.float32([0])), tmp_path))
    assert {name for name, _ in net.named_parameters()} == set(STORED)


def test_numbers_of_another_composite_leave_no_parameter(tmp_path: Path) -> None:
    stored = {"gate.slope": np.float32([0.2]), "gate.offset": np.float32([0.5]), "const_0": np.float32(0)}
    nodes = [
        node("Mul", "x gate.slope", "m"),
        node("Add", "m gate.offset", "a"),
        node("Clip", "a const_0 const_1", "y"),
    ]
    path = save(model(nodes, {"x": X.shape}, stored={**stored, "const_1": np.float32(1)}), tmp_path)
    net = qtrace.from_onnx(path)
    assert _labels(net) == ["qtrace.graph.functions.hard_sigmoid"]
    assert net.state_dict() == {}


def test_constants_that_a_composite_took_leave_no_tensor(tmp_path: Path) -> None:
    """As a Gelu that an exporter writes as the function that it is in ONNX, with its numbers cast like x."""
    numbers = {"half": 0.5, "one": 1.0, "two": 2.0}
    constants = [
        helper.make_node("Constant", [], [f"{name}_0"], value=numpy_helper.from_array(np.float32(number)))
        for name, number in numbers.items()
    ]
    casts = [node("CastLike", f"{name}_0 x", name) for name in numbers]
    nodes = [
        node("Sqrt", "two", "root"),
        node("Div", "x root", "d"),
        node("Erf", "d", "e"),
        node("Sum", "one e", "s"),
        node("Mul", "x s", "p"),
        node("Mul", "half p", "y"),
    ]
    net = qtrace.from_onnx(save(model([*constants, *casts, *nodes], {"x": X.shape}), tmp_path))
    assert _labels(net) == ["F.gelu"]
    assert net.state_dict() == {}


def test_a_constant_of_an_op_that_is_kept_as_in_the_file_leaves_no_tensor(tmp_path: Path) -> None:
    """As in torchvision's detectors, whose boxes are numbered up to a count that the data decide."""
    names = [f"/heads/Constant_{number}_output_0" for number in range(2)]
    constants = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(number, np.int64)))
        for number, name in enumerate(names)
    ]
    nodes = [
        node("NonZero", "x", "places"),
        node("Shape", "places", "shape"),
        node("Gather", "shape one", "count"),
        node("Range", f"{names[0]} count {names[1]}", "y"),
    ]
    stored = {"one": np.array(1, np.int64)}
    proto = model([*constants, *nodes], {"x": (2, 3)}, ["y"], stored, dtypes={"y": np.int64})
    net = qtrace.from_onnx(save(proto, tmp_path))
    assert not [name for name in net.state_dict() if "Constant" in name]
    values = np.float32([[1, 0, 2], [0, 3, 0]])
    np.testing.assert_array_equal(net(mge.Tensor(values)).numpy(), [0, 1, 2])


def test_a_factor_with_the_name_of_a_layers_tensor_is_a_parameter(tmp_path: Path) -> None:
    """As the scale of each level in the head of FCOS."""
    stored = {"head.scales.0.scale": np.float32([1.5]), "model/mul/y": np.float32([0.5])}
    nodes = [node("Mul", "x head.scales.0.scale", "m"), node("Mul", "m model/mul/y", "y")]
    net = qtrace.from_onnx(save(model(nodes, {"x": X.shape}, stored=stored), tmp_path))
    assert {name for name, _ in net.named_parameters()} == {"head.scales.0.scale"}
    np.testing.assert_allclose(net(mge.Tensor(X)).numpy(), X * np.float32(0.75), rtol=1e-6)


def test_a_tensor_that_is_only_moved_keeps_its_name_and_is_one_parameter(tmp_path: Path) -> None:
    square = weights(5, 5, seed=4)
    nodes = [
        node("Transpose", "fc.weight", "turned", perm=[1, 0]),
        node("MatMul", "x turned", "a"),
        node("MatMul", "a fc.weight", "b"),
        node("Unsqueeze", "position axes", "p"),
        node("Add", "b p", "y"),
    ]
    stored = {"fc.weight": square, "position": weights(4, 5, 5), "axes": np.int64([0])}
    net = qtrace.from_onnx(save(model(nodes, {"x": X.shape}, stored=stored), tmp_path))
    assert {name for name, _ in net.named_parameters()} == {"fc.weight", "position"}
    expected = X @ square.T @ square + stored["position"]
    np.testing.assert_allclose(net(mge.Tensor(X)).numpy(), expected, rtol=0, atol=1e-5)


PLAIN = {
    "numbers that no one named": ("x const_a", "m const_b", "y"),
    "a product that is read twice": ("x s", "m t", "y m"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_other_products_and_sums_have_constant_arguments(tmp_path: Path, name: str) -> None:
    product, total, outputs = PLAIN[name]
    stored = {n: STORED[key] for n, key in (("const_a", "lab.scale"), ("const_b", "lab.bias"))}
    stored |= {"s": STORED["lab.scale"], "t": STORED["lab.bias"]}
    nodes = [node("Mul", product, "m"), node("Add", total, "y")]
    net = qtrace.from_onnx(save(model(nodes, {"x": X.shape}, outputs.split(), stored), tmp_path))
    assert _labels(net) == ["F.mul", "F.add"]
    assert net.state_dict() == {}


def test_a_product_that_the_body_of_a_node_reads_is_no_scale() -> None:
    """As a branch of torch's `if` that looks at a value from outside."""
    body = helper.make_graph(
        [node("Identity", "m", "inside")],
        "branch",
        [],
        [helper.make_tensor_value_info("inside", onnx.TensorProto.FLOAT, None)],
    )
    nodes = [
        node("Mul", "x s.factor", "m"),
        node("Add", "m t.shift", "y"),
        helper.make_node("If", ["condition"], ["z"], then_branch=body, else_branch=body),
    ]
    stored = {"s.factor": STORED["lab.scale"], "t.shift": STORED["lab.bias"]}
    proto = model(nodes[:2], {"x": X.shape}, ["y"], stored)
    assert find_scales_and_shifts(read_graph(proto.graph, {"": 17}, stored)) == set(stored)
    proto.graph.node.append(nodes[2])
    assert find_scales_and_shifts(read_graph(proto.graph, {"": 17}, stored)) == set()
