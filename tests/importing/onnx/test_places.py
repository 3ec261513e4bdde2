"""Ops that write numbers at places or read between pixels, against ONNX's reference implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

import qtrace
from qtrace.errors import ImportingError
from tests.each import each_of
from tests.importing.onnx.judging import difference, import_and_run
from tests.importing.onnx.networks import model, node, save
from tests.importing.onnx.test_lowered_forms import F32, RNG, check, write


@each_of("axis", [0, 1, -1])
def test_updates_are_written_to_elements(tmp_path: Path, axis: int) -> None:
    x = RNG.normal(size=(3, 4, 5)).astype(F32)
    rows = np.stack([RNG.permutation(3)[:2] for _ in range(12)], -1).reshape(2, 3, 4)
    index = np.moveaxis(rows, 0, axis)
    index = np.where(index == 0, -x.shape[axis], index)  # from the end
    updates = RNG.normal(size=index.shape).astype(F32)
    _check_scatter(tmp_path, "ScatterElements", {"x": x, "u": updates}, index, axis=axis)


def _check_scatter(
    folder: Path, op: str, inputs: dict[str, np.ndarray], index: np.ndarray, **attributes: Any
) -> None:
    """Compares a scatter of stored places: the index stands between the data and the updates."""
    shapes = {name: array.shape for name, array in inputs.items()}
    names = "x i u"
    path = save(model([node(op, names, "y", **attributes)], shapes, stored={"i": index}, opset=18), folder)
    (expected,) = ReferenceEvaluator(onnx.load(path)).run(None, inputs)
    net = qtrace.from_onnx(path)
    assert np.array_equal(net(*map(mge.Tensor, inputs.values())).numpy(), expected)


@each_of("depth", [1, 2, 3])
def test_updates_are_written_to_parts(tmp_path: Path, depth: int) -> None:
    x = RNG.normal(size=(3, 4, 5)).astype(F32)
    index = np.array([[0, 1, 2], [-1, 3, 0]])[:, :depth]
    updates = RNG.normal(size=(2, *x.shape[depth:])).astype(F32)
    _check_scatter(tmp_path, "ScatterND", {"x": x, "u": updates}, index)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "beyond the end": (np.array([[3]]), {}, "writes to places that its data do not have"),
    "too many": (np.array([[0], [1]]), {}, "has 4 updates for 8 places"),
    "too deep": (np.array([[0, 0, 0]]), {}, r"has an index of the shape \[1, 3\]"),
}


@each_of("name", REFUSED)
def test_other_places_are_refused(tmp_path: Path, name: str) -> None:
    index, attributes, message = REFUSED[name]
    nodes = [node("ScatterND", "x i u", "y", **attributes)]
    proto = model(nodes, {"x": (3, 4), "u": (1, 4)}, stored={"i": index}, opset=18)
    with pytest.raises(ImportingError, match=f"'y'.*{message}"):
        qtrace.from_onnx(save(proto, tmp_path))


def test_places_of_a_free_batch_are_kept(tmp_path: Path) -> None:
    proto = model(
        [node("ScatterND", "x i u", "y")], {"x": ("n", 4), "u": (1, 4)}, stored={"i": np.array([[0]])}
    )
    net = qtrace.from_onnx(save(proto, tmp_path))
    x, update = np.zeros((3, 4), F32), np.ones((1, 4), F32)
    assert net(mge.Tensor(x), mge.Tensor(update)).numpy().tolist() == [[1] * 4, [0] * 4, [0] * 4]


@each_of("values", [F32([0, 1]), F32([-1, 3]), np.int64([2, 5])])
@each_of("axis", [-1, 1])
def test_one_hot(tmp_path: Path, axis: int, values: np.ndarray) -> None:
    index = np.int64([[0, 2, -1], [4, -4, 7]])
    check(tmp_path, "OneHot", {"i": index}, {"d": np.int64([4]), "v": values}, axis=axis)


def test_marks_that_float32_cannot_add_are_kept(tmp_path: Path) -> None:
    stored = {"d": np.int64([4]), "v": F32([1e8, 1])}
    check(tmp_path, "OneHot", {"i": np.int64([0, 2])}, stored)


@each_of("aligned", [0, 1])
@each_of("padding", ["zeros", "border"])
def test_an_image_is_sampled_between_its_pixels(tmp_path: Path, padding: str, aligned: int) -> None:
    x = RNG.normal(size=(2, 3, 5, 6)).astype(F32)
    grid = RNG.uniform(-1.4, 1.4, (2, 4, 7, 2)).astype(F32)
    check(
        tmp_path,
        "GridSample",
        {"x": x, "g": grid},
        None,
        ("y",),
        16,
        padding_mode=padding,
        align_corners=aligned,
    )


@each_of("power", [1, 2, 3])
def test_pooling_by_powers(tmp_path: Path, power: int) -> None:
    x = RNG.normal(size=(2, 3, 6, 7)).astype(F32)
    check(tmp_path, "LpPool", {"x": x}, kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 1], p=power)
    expected = (np.abs(x.astype(np.float64)) ** power).sum((2, 3), keepdims=True) ** (1 / power)
    path = write(tmp_path / "m.onnx", "GlobalLpPool", {"x": x}, expected=[F32(expected)], p=power)
    np.testing.assert_allclose(qtrace.from_onnx(path)(mge.Tensor(x)).numpy(), expected, rtol=1e-5)


@each_of("pads", [[1, 1], [0, 2], [2, 1]])
@each_of("stored", [True, False])
def test_a_transposed_convolution_of_signals(tmp_path: Path, stored: bool, pads: list[int]) -> None:
    x, weight, bias = (RNG.normal(size=s).astype(F32) for s in ((2, 4, 5), (4, 3, 3), (6,)))
    rest = {"w": weight, "b": bias}
    inputs = {"x": x} if stored else {"x": x, **rest}
    attributes = {"group": 2, "strides": [2], "pads": pads, "output_padding": [1]}
    length = 2 * 4 + 3 + 1 - sum(pads)
    args = (inputs, rest if stored else None, ("y",), 18, [np.zeros((2, 6, length), F32)])
    path = write(tmp_path / "m.onnx", "ConvTranspose", *args, **attributes)
    (expected,) = ort.InferenceSession(str(path)).run(None, inputs)  # the reference knows no groups here
    assert difference(import_and_run(path, inputs)[0], expected) == ""


def test_groups_with_more_output_padding_than_pads_are_kept(tmp_path: Path) -> None:
    weight, x = (RNG.normal(size=s).astype(F32) for s in ((4, 3, 3), (2, 4, 5)))
    attributes = {"group": 2, "strides": [2], "output_padding": [1]}
    args = ("ConvTranspose", {"x": x}, {"w": weight}, ("y",), 18, [np.zeros((2, 6, 12), F32)])
    path = write(tmp_path / "m.onnx", *args, **attributes)
    (expected,) = ort.InferenceSession(str(path)).run(None, {"x": x})
    assert difference(import_and_run(path, {"x": x})[0], expected) == ""
