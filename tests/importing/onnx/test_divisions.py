"""Integers that are divided by values of the graph, and inputs of 16 bits without a sign."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import numpy as np
import onnx
import pytest
from onnx import helper

import qtrace
from qtrace.errors import ExportError, GraphError
from qtrace.export.onnx.segment import activations
from qtrace.onnxfile.sessions import open_session

LOWEST = np.iinfo(np.int32).min


def _file(folder: Path, op: str, dtype: type, sizes: list[int | str], **attributes: int) -> Path:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    values = [helper.make_tensor_value_info(name, kind, sizes) for name in "abc"]
    node = helper.make_node(op, ["a", "b"], ["c"], **attributes)
    model = helper.make_model(
        helper.make_graph([node], "g", values[:2], values[2:]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    path = folder / "m.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("op", ["Div", "Mod"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int8, np.uint8, np.uint16, np.uint32])
def test_the_quotient_is_that_of_the_file(op: str, dtype: type, tmp_path: Path) -> None:
    path = _file(tmp_path, op, dtype, [5])
    a, b = np.array([7, 100, 3, 50, 9], dtype), np.array([2, 7, 5, 1, 4], dtype)
    if np.dtype(dtype).kind == "i":
        a[::2] *= -1
    (expected,) = open_session(path).run(None, {"a": a, "b": b})
    traced = qtrace.from_onnx(path)
    carried = [mge.Tensor(x if x.dtype.itemsize == 1 else x.astype(np.int32)) for x in (a, b)]
    np.testing.assert_array_equal(traced(*carried).numpy(), expected)
    again = qtrace.export(traced, tmp_path / "again.onnx")
    np.testing.assert_array_equal(open_session(again).run(None, {"a": a, "b": b})[0], expected)


@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_what_would_end_the_process_is_a_sentence(op: str, tmp_path: Path) -> None:
    traced = qtrace.from_onnx(_file(tmp_path, op, np.int32, [2]))
    with pytest.raises(
        GraphError, match=rf"{op} divides integers by 0, at which onnxruntime ends the process"
    ):
        traced(mge.Tensor(np.int32([1, 2])), mge.Tensor(np.int32([1, 0])))
    with pytest.raises(GraphError, match=rf"{op} divides {LOWEST} by -1, which exceeds int32"):
        traced(mge.Tensor(np.int32([LOWEST, 2])), mge.Tensor(np.int32([-1, 1])))
    with pytest.raises(ExportError, match=r"divides by integers, and onnxruntime ends the process"):
        activations(qtrace.prepare(traced, progress=False), [])


def test_open_axes_are_checked_without_a_division_by_zero(tmp_path: Path) -> None:
    traced = qtrace.from_onnx(_file(tmp_path, "Div", np.int32, ["N", "T"]), {"a": (2, 3), "b": (2, 3)})
    result = traced(mge.Tensor(np.full((4, 5), 9, np.int32)), mge.Tensor(np.full((4, 5), 2, np.int32)))
    np.testing.assert_array_equal(result.numpy(), np.full((4, 5), 4))
