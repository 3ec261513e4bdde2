"""Ops that PyTorch's exporters write, against ONNX's reference implementation."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import numpy as np
import onnxruntime
import pytest
from megengine import Tensor

import qtrace
from qtrace.errors import ImportingError
from qtrace.onnxfile.sessions import open_session
from tests.each import each_of
from tests.importing.onnx.networks import model, node, save, weights
from tests.importing.onnx.test_lowered_forms import check


def _compare(proto: object, folder: Path, *batches: np.ndarray, shape: tuple[int, ...]) -> None:
    """Compares the import with onnxruntime for several sizes of the batch."""
    path = save(proto, folder)
    traced = qtrace.from_onnx(path, {"x": shape})
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for x in batches:
        (expected,) = session.run(None, {"x": x})
        result = traced(Tensor(x)).numpy()
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("index", [[[0, 1], [2, -1], [1, 1]], [[[0, 0]], [[2, 3]]], [[1], [0]]])
def test_gather_nd_of_stored_places_with_an_open_batch(index: list, tmp_path: Path) -> None:
    """An adaptive pooling picks rows and columns, which stand first, of all samples and channels."""
    nodes = [
        node("Transpose", "x", "t", perm=[2, 3, 0, 1]),
        node("GatherND", "t index", "p"),
        node("Add", "p one", "y"),
    ]
    stored = {"index": np.array(index, np.int64), "one": np.ones(1, np.float32)}
    proto = model(nodes, {"x": ["N", 2, 3, 4]}, ["y"], stored)
    x = weights(3, 2, 3, 4)
    _compare(proto, tmp_path, x[:1], x, shape=(2, 2, 3, 4))


def test_gather_nd_that_megengine_cannot_compute(tmp_path: Path) -> None:
    places = np.array([[0], [1]], np.int64)
    proto = model([node("GatherND", "x i", "y", batch_dims=1)], {"x": (2, 3)}, ["y"], {"i": places})
    _compare_with_runtime(save(proto, tmp_path), weights(2, 3))
    proto = model([node("GatherND", "x i", "y")], {"x": (2, 3)}, ["y"], {"i": places + 5})
    with pytest.raises(ImportingError, match="does not have"):
        qtrace.from_onnx(save(proto, tmp_path))


def _compare_with_runtime(path: Path, x: np.ndarray) -> None:
    """A node that is kept gives what onnxruntime gives."""
    (expected,) = open_session(path).run(None, {"x": x})
    np.testing.assert_allclose(qtrace.from_onnx(path)(mge.Tensor(x)).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("sizes", [2, [1, 3], 4])
def test_a_split_into_a_sequence_that_is_picked_from(sizes: int | list[int], tmp_path: Path) -> None:
    """``x.chunk(2, 1)`` of torch."""
    nodes = [
        node("SplitToSequence", "x sizes", "parts", axis=1),
        node("SequenceAt", "parts first", "a"),
        node("SequenceAt", "parts last", "b"),
        node("Concat", "b a", "y", axis=1),
    ]
    places = {"first": np.array(0, np.int64), "last": np.array(-1, np.int64)}
    proto = model(nodes, {"x": ["N", 4, 3]}, ["y"], {"sizes": np.array(sizes, np.int64), **places})
    x = weights(3, 4, 3)
    _compare(proto, tmp_path, x[:1], x, shape=(2, 4, 3))


@each_of("sizes", [[8, 0], [0, 8], [3, 0, 5], [0, 8, 0]])
def test_a_part_of_a_split_that_is_empty(sizes: list[int], tmp_path: Path) -> None:
    """What turns all values of a head by their places, where a network may leave some as they are."""
    parts = " ".join(f"p{i}" for i in range(len(sizes)))
    nodes = [node("Split", "x sizes", parts, axis=1), node("Concat", parts, "y", axis=1)]
    proto = model(nodes, {"x": (2, 8)}, ["y"], {"sizes": np.array(sizes, np.int64)})
    x = weights(2, 8)
    _compare(proto, tmp_path, x, shape=x.shape)


@pytest.mark.parametrize("ends", [(8, 8, 1), (3, 3, 1), (5, 2, 1), (0, 4, -1), (-1, -1, -1)])
def test_a_slice_that_is_empty(ends: tuple[int, int, int], tmp_path: Path) -> None:
    names = ("start", "end", "axis", "step")
    stored = {n: np.array([v], np.int64) for n, v in zip(names, (*ends[:2], 1, ends[2]), strict=True)}
    nodes = [node("Slice", "x start end axis step", "none"), node("Concat", "x none", "y", axis=1)]
    x = weights(2, 8)
    _compare(model(nodes, {"x": (2, 8)}, ["y"], stored), tmp_path, x, shape=x.shape)


EQUATIONS = {
    "bhid,bhjd->bhij": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "bij,jk->bik": ((2, 3, 4), (4, 5)),
    "ij,kj->ki": ((2, 3), (4, 3)),
    "bchw,cd->bdhw": ((2, 3, 4, 5), (3, 6)),
    "nctkv,kvw->nctw": ((2, 3, 4, 2, 5), (2, 5, 6)),
    "bi,bj->bij": ((2, 3), (2, 4)),
    "bi,bi->b": ((2, 3), (2, 3)),
    "bij,bk": ((2, 3, 4), (2, 5)),
    "bijk,bj->bi": ((2, 3, 4, 5), (2, 4)),
    "bij->ji": ((2, 3, 4),),
}


@each_of("equation", EQUATIONS)
def test_einstein_sums(equation: str, tmp_path: Path) -> None:
    inputs = {
        name: weights(*shape, seed=i)
        for i, (name, shape) in enumerate(zip("ab", EQUATIONS[equation], strict=False))
    }
    check(tmp_path, "Einsum", inputs, equation=equation)


def test_an_einstein_sum_with_an_open_batch(tmp_path: Path) -> None:
    nodes = [node("Einsum", "x w", "y", equation="bchw,ckd->bhwkd")]
    proto = model(nodes, {"x": ["N", 3, 4, 5]}, ["y"], {"w": weights(3, 2, 6)})
    x = weights(4, 3, 4, 5)
    _compare(proto, tmp_path, x[:1], x, shape=(2, 3, 4, 5))


@pytest.mark.parametrize("equation", ["...ij,jk->...ik", "ii->i", "ij,ij->"])
def test_einstein_sums_that_have_no_matrix_product(equation: str, tmp_path: Path) -> None:
    names = ["x", "w"][: equation.count(",") + 1]
    nodes = [node("Einsum", " ".join(names), "y", equation=equation)]
    proto = model(nodes, {"x": (3, 3)}, ["y"], {"w": weights(3, 3)})
    _compare_with_runtime(save(proto, tmp_path), weights(3, 3))


def test_einstein_sums_that_contradict_their_inputs(tmp_path: Path) -> None:
    proto = model([node("Einsum", "x w v", "y", equation="bij,bj,bi->b")], dict.fromkeys("xwv", (2, 3)))
    with pytest.raises(ImportingError, match="Einsum 'y'"):
        qtrace.from_onnx(save(proto, tmp_path))


@each_of("place", ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"])
@each_of("sizes", [(9, 7), (3, 12), (6, 2)])
def test_cubic_resizing(place: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    nodes = [node("Resize", "x _ _ sizes", "y", mode="cubic", coordinate_transformation_mode=place)]
    stored = {"sizes": np.array([2, 3, *sizes], np.int64)}
    _compare(
        model(nodes, {"x": (2, 3, 6, 5)}, ["y"], stored), tmp_path, weights(2, 3, 6, 5), shape=(2, 3, 6, 5)
    )


def test_cubic_resizing_by_scales_with_an_open_batch(tmp_path: Path) -> None:
    nodes = [node("Resize", "x _ scales", "y", mode="cubic", cubic_coeff_a=-0.5)]
    proto = model(nodes, {"x": ["N", 2, 6, 5]}, ["y"], {"scales": np.array([1, 1, 2, 1.5], np.float32)})
    x = weights(3, 2, 6, 5)
    _compare(proto, tmp_path, x[:1], x, shape=(2, 2, 6, 5))


@pytest.mark.parametrize("op", ["Tile", "ConstantOfShape"])
def test_numbers_repeated_by_the_batch(op: str, tmp_path: Path) -> None:
    nodes = [node("Shape", "x", "n", start=0, end=1)]
    if op == "Tile":
        nodes += [node("Concat", "n two", "r", axis=0), node("Tile", "row r", "t")]
    else:
        nodes += [node("Concat", "n two", "r", axis=0), node("ConstantOfShape", "r", "t")]
    nodes += [node("Concat", "x t", "y", axis=1)]
    stored = {"two": np.array([2], np.int64), "row": weights(1, 3)}
    x = weights(3, 4)
    _compare(model(nodes, {"x": ["N", 4]}, ["y"], stored), tmp_path, x[:1], x, shape=(2, 4))


@each_of("mode", ["cubic", "linear", "nearest"])
def test_corners_that_are_aligned_by_a_fraction_are_kept(mode: str, tmp_path: Path) -> None:
    """onnx places the last corner at the scaled size, 3.2 here, and onnxruntime at that of the result, 3."""
    nodes = [
        node("Resize", "x _ scales", "y", mode=mode, coordinate_transformation_mode="align_corners"),
    ]
    scales = np.array([1, 1, 0.8, 0.8], np.float32)
    proto = model(nodes, {"x": (1, 1, 4, 4)}, ["y"], {"scales": scales})
    _compare_with_runtime(save(proto, tmp_path), weights(1, 1, 4, 4))
