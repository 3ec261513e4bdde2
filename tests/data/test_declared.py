"""Data against what an imported file declares: names of inputs that are no identifiers, and fixed sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from megengine import Tensor
from onnx import TensorProto, helper, numpy_helper

import qtrace
from qtrace.data.batches import as_arguments, cure_for_shape
from qtrace.data.opening import open_data
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from tests.each import each_of
from tests.nets import net

NAMES = [
    ("input:0", "other:0"),
    ("images/input", "a b"),
    ("a:b", "a_b"),
    ("a_b", "a:b"),
    ("class", "1x"),
    ("größe", "é"),
    ("serving_default_x:0", "self"),
]


def _imported(folder: Path, names: tuple[str, str], sizes: tuple[Any, Any]) -> TracedModule:
    """Two convolutions of two inputs, of 3 and 4 channels, added."""
    values = np.random.default_rng(0).standard_normal((4, 7, 3, 3)).astype(np.float32)
    stored = [numpy_helper.from_array(values[:, :3], "v"), numpy_helper.from_array(values[:, 3:], "w")]
    nodes = [
        helper.make_node("Conv", [names[0], "v"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", [names[1], "w"], ["d"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "d"], ["out:0"]),
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, size)
        for name, size in zip(names, sizes, strict=True)
    ]
    outputs = [helper.make_tensor_value_info("out:0", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    path = folder / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return qtrace.from_onnx(path, {names[1]: (1, 4, 8, 8)} if "H" in sizes[1] else None)


def _batch(names: tuple[str, str], size: int = 8) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    shapes = ((2, 3, size, size), (2, 4, size, size))
    return {n: random.standard_normal(s).astype(np.float32) for n, s in zip(names, shapes, strict=True)}


@pytest.mark.quick(3)
@pytest.mark.parametrize("names", NAMES, ids=str)
def test_inputs_have_their_names_of_the_file(tmp_path: Path, names: tuple[str, str]) -> None:
    traced = _imported(tmp_path, names, (["N", 3, 8, 8], ["N", 4, "H", "W"]))
    batch = _batch(names)
    args, kwargs = as_arguments(batch, traced)
    expected = traced(*(Tensor(batch[name]) for name in names)).numpy()
    np.testing.assert_array_equal(traced(*args, **kwargs).numpy(), expected)


def test_names_of_the_file_last_from_calibration_to_the_exported_file(tmp_path: Path) -> None:
    names = ("input:0", "input_0")
    traced = _imported(tmp_path, names, (["N", 3, 8, 8], ["N", 4, "H", "W"]))
    prepared = qtrace.prepare(traced, "w8a8", samples=[_batch(names)])
    qtrace.calibrate(prepared, [_batch(names)], progress=False)
    qtrace.save(qtrace.convert(prepared), tmp_path / "c.mge")
    converted = qtrace.load(tmp_path / "c.mge")
    qtrace.export(converted, tmp_path / "int8.onnx")
    graph = onnx.load(tmp_path / "int8.onnx").graph
    assert [value.name for value in (*graph.input, *graph.output)] == [*names, "out:0"]
    assert qtrace.verify(tmp_path / "int8.onnx", converted, [_batch(names)], optimized=False).passed
    assert qtrace.compare(converted, [_batch(names)]).sites


def test_messages_and_recipes_have_the_names_of_the_file(tmp_path: Path) -> None:
    names = ("input:0", "b/c")
    traced = _imported(tmp_path, names, (["N", 3, 8, 8], ["N", 4, "H", "W"]))
    with pytest.raises(CalibrationError, match=r"takes 2 inputs, input:0 of shape .* and b/c of shape"):
        as_arguments({"x": np.zeros((1, 3, 8, 8), np.float32)}, traced)
    labels = {**_batch(names), "label": np.zeros(2, np.float32)}
    with pytest.raises(CalibrationError, match=r"leave out what is no input, such as labels \('label'\)"):
        as_arguments(labels, traced)
    assert qtrace.prepare(traced, "int8", inputs="input:0", outputs="out:0")
    rule = {"match": {"name": "out:0"}, "quantize": False}
    notes = qtrace.explain(qtrace.prepare(traced, {"rules": [rule]})).table(None)
    assert "quantize: false" in notes


def test_sizes_that_a_file_fixes_are_held_against_all_data(tmp_path: Path) -> None:
    names = ("x", "y")
    traced = _imported(tmp_path, names, ([1, 3, 8, 8], [1, 4, 8, 8]))
    message = r"gives 'x' of shape \(2, 3, 16, 16\), .* fixes it to \(1, 3, 8, 8\): give data of this size"
    large, fitting = [_batch(names, 16)], [_batch(names)]  # the first axis counts samples
    with pytest.raises(CalibrationError, match=message):
        qtrace.prepare(traced, "int8", samples=large)
    prepared = qtrace.prepare(traced, "int8")
    with pytest.raises(CalibrationError, match=message):
        qtrace.calibrate(prepared, large, progress=False)
    qtrace.calibrate(prepared, fitting, progress=False)
    for call, options in (
        (qtrace.compare, {}),
        (qtrace.sensitivity.analyze, {}),
        (qtrace.finetune, {"teacher": traced}),
    ):
        with pytest.raises(CalibrationError, match=message):
            call(prepared, large, **options)
    qtrace.save(qtrace.convert(prepared), tmp_path / "c.mge")
    converted = qtrace.load(tmp_path / "c.mge")
    qtrace.export(converted, tmp_path / "int8.onnx")
    with pytest.raises(CalibrationError, match=message):
        qtrace.verify(tmp_path / "int8.onnx", converted, large)


def test_sizes_that_an_op_fixes_are_refused_and_traced_sizes_are_examples(tmp_path: Path) -> None:
    names = ("x", "y")
    traced = _imported(tmp_path, names, (["N", 3, 8, 8], ["N", 4, "H", "W"]))
    batch = {"x": _batch(names)["x"], "y": np.zeros((2, 4, 9, 9), np.float32)}
    with pytest.raises(CalibrationError, match=r"axis 2 \(H\) of input y is fixed: Add 'out:0'"):
        as_arguments(batch, traced)
    module = qtrace.trace(
        net(lambda self, x: x * 2.0 + 1.0), Tensor(np.ones((1, 3, 8, 8), np.float32)), check=False
    )
    as_arguments(np.zeros((2, 3, 16, 16), np.float32), module)


@each_of(
    ("shape", "traced", "cure"),
    [
        ((2, 8, 8, 3), (1, 3, 8, 8), r"NHWC: transpose (0, 3, 1, 2)"),
        ((2, 3, 8, 8), (1, 8, 8, 3), r"NCHW: transpose (0, 2, 3, 1)"),
        ((3, 8, 8), (1, 3, 8, 8), "x[None]"),
        ((8, 8, 3), (1, 3, 8, 8), "x.transpose(2, 0, 1)[None]"),
        ((8, 8), (1, 1, 8, 8), "x[None, None]"),
        ((2, 3, 9, 9), (1, 3, 8, 8), ""),
        ((2, 3, 8, 3), (1, 3, 8, 8), ""),
        ((2, 7), (1, 8), ""),
    ],
)
def test_cures_of_the_order_of_axes(shape: Any, traced: Any, cure: str) -> None:
    text = cure_for_shape(shape, traced)
    assert cure in text
    assert bool(cure) == bool(text)


@each_of("op", ["Greater", "Less", "Equal"])
@each_of("dtype", ["uint16", "uint32", "int64"])
def test_integers_in_the_type_of_the_file_become_those_of_the_graph(
    op: str, dtype: str, tmp_path: Path
) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node(op, ["x", "limit"], ["z"]),
        helper.make_node("Cast", ["z"], ["y"], to=TensorProto.FLOAT),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(np.array([40000], dtype), "limit")],
    )
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    traced = qtrace.from_onnx(path)
    x = np.array([[0, 39999, 40000, 65535]], dtype)
    expected = {"Greater": x > 40000, "Less": x < 40000, "Equal": x == 40000}[op]
    for batch in (x, {"x": x}):
        args, kwargs = as_arguments(batch, traced)
        assert np.array_equal(traced(*args, **kwargs).numpy(), expected)


def _net_of(path: Path, dtype: str) -> qtrace.TracedModule:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)],
        "g",
        [helper.make_tensor_value_info("x", kind, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return qtrace.from_onnx(path)


@each_of("given", ["uint8", "int64", "float64", "bool", "int8"])
@each_of("dtype", ["uint8", "int8", "int64", "bool", "float32", "float16"])
def test_inputs_have_the_type_of_the_file(dtype: str, given: str, tmp_path: Path) -> None:
    """Sources of data read pixels as float32, and masks come as integers and floats."""
    traced = _net_of(tmp_path / "net.onnx", dtype)
    source = open_data([np.array([[0, 1, 1, 0]], given)])
    for args, _ in (
        as_arguments(np.array([[0, 1, 1, 0]], given), traced),
        as_arguments(next(iter(source)), traced),
    ):
        assert np.dtype(args[0].dtype) == np.dtype(traced.graph.inputs[1].dtype)
        assert args[0].numpy().tolist() == [[0, 1, 1, 0]]


@each_of(("dtype", "number"), [("uint8", 0.5), ("uint8", 256), ("int8", 200), ("int64", 0.5), ("bool", 255)])
def test_numbers_that_the_type_of_the_file_has_not_are_refused(
    dtype: str, number: float, tmp_path: Path
) -> None:
    traced = _net_of(tmp_path / "net.onnx", dtype)
    given = np.array([[0, 1, 1, number]], np.float32 if number == 0.5 else np.int32)
    with pytest.raises(CalibrationError, match=f"batch 3 gives 'x' .* such as {number:g}, .* takes {dtype}"):
        as_arguments(given, traced, 3)
