"""Tensors in other files: a map of the file, packed types, tensors of nodes, and memory given back."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qtrace.errors import ExportError
from qtrace.onnxfile.external_data import load_model, map_tensor, read_model, release, without_large_values
from tests.each import each_of

VALUES = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)


def _save(folder: Path, stored: list[TensorProto], inside: TensorProto | None = None) -> Path:
    """Saves a model with all of its tensors in another file; `inside` is the value of a Constant."""
    nodes = [helper.make_node("Identity", [stored[0].name], ["y"])]
    if inside is not None:
        nodes.append(helper.make_node("Constant", [], ["c"], value=inside))
    result = helper.make_tensor_value_info("y", stored[0].data_type, list(stored[0].dims))
    model = helper.make_model(helper.make_graph(nodes, "g", [], [result], stored))
    path = folder / "m.onnx"
    options = {"save_as_external_data": True, "location": "m.bin", "size_threshold": 0}
    onnx.save(model, str(path), convert_attribute=True, **options)
    return path


def _base(array: np.ndarray) -> object:
    while isinstance(array, np.ndarray):
        array = array.base
    return array


def test_a_tensor_is_mapped_and_read_again_after_its_memory_was_given_back(tmp_path: Path) -> None:
    path = _save(tmp_path, [numpy_helper.from_array(VALUES, "w")])
    array = map_tensor(read_model(path).graph.initializer[0], path)
    assert isinstance(_base(array), mmap.mmap)
    for _ in range(2):
        np.testing.assert_array_equal(array, VALUES)
        release(array)
    release(VALUES)  # an array in memory stays


@each_of("kind", ["INT4", "UINT4", "UINT2", "BFLOAT16"])
def test_types_that_numpy_lacks(kind: str, tmp_path: Path) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]])
    stored = helper.make_tensor("w", getattr(TensorProto, kind), values.shape, values.ravel())
    path = _save(tmp_path, [numpy_helper.from_array(numpy_helper.to_array(stored), "w")])
    tensor = read_model(path).graph.initializer[0]
    assert tensor.data_type == stored.data_type
    np.testing.assert_array_equal(map_tensor(tensor, path).astype(np.int64), values)


def test_tensors_of_nodes_are_loaded_and_checked_too(tmp_path: Path) -> None:
    path = _save(tmp_path, [numpy_helper.from_array(VALUES, "w")], numpy_helper.from_array(VALUES + 1, "v"))
    model, folder = load_model(path)
    assert folder is None
    np.testing.assert_array_equal(numpy_helper.to_array(model.graph.node[1].attribute[0].t), VALUES + 1)
    (tmp_path / "m.bin").write_bytes(VALUES.tobytes())
    with pytest.raises(ExportError, match=r"m\.bin is not whole: m\.onnx needs \d+ bytes of it"):
        load_model(path)


def test_a_copy_without_large_values_is_small_and_valid() -> None:
    small = numpy_helper.from_array(np.float32([1, 2]), "s")
    graph = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 32])],
        [numpy_helper.from_array(VALUES, "w"), small],
    )
    model = helper.make_model(graph, producer_name="me")
    copy = without_large_values(model)
    onnx.checker.check_model(copy)
    assert copy.ByteSize() < 500
    assert copy.producer_name == "me"
    np.testing.assert_array_equal(numpy_helper.to_array(copy.graph.initializer[0]), [1, 2])
