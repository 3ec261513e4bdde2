"""Softmax and its logarithm from ONNX: logits of every size, one op in the graph and in each file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import numpy as np
import onnx
import pytest

import qtrace
from qtrace import ops
from qtrace.graph import functions
from qtrace.graph.tracing.tracer import attention_in_parts
from qtrace.graph.walk import exprs
from tests.each import each_of
from tests.importing.onnx.networks import model, node, save
from tests.importing.onnx.test_lowered_forms import import_and_run, write

F32 = np.float32
SHAPE = (2, 3, 4, 5)
BASE = np.random.default_rng(0).normal(scale=2, size=SHAPE)
LOGITS = {
    "below -87": BASE - 100,
    "-1e4": BASE - 1e4,
    "equal and -1e30": np.full(SHAPE, -1e30),
    "equal and 3e38": np.full(SHAPE, 3e38),
    "rows of unlike size": BASE + np.float64([-1e4, 1e30, -100, 0, -1e30, 1e4]).reshape(2, 3, 1, 1),
    "a mask": BASE - 100 - 1e30 * (BASE > 1),
}
OPS = ("Softmax", "LogSoftmax")


def reference(op: str, x: np.ndarray, axis: int, flat: bool) -> np.ndarray:
    rows = x.astype(np.float64)
    if flat:
        rows, axis = rows.reshape(int(np.prod(x.shape[:axis])), -1), 1
    below = rows - rows.max(axis, keepdims=True)
    total = np.exp(below).sum(axis, keepdims=True)
    return (np.exp(below) / total if op == "Softmax" else below - np.log(total)).reshape(x.shape)


@each_of("opset", [11, 13])
@each_of("name", LOGITS)
@each_of("op", OPS)
def test_logits_of_every_size_along_every_axis(tmp_path: Path, op: str, name: str, opset: int) -> None:
    x = LOGITS[name].astype(F32)
    for axis in range(len(SHAPE)):
        expected = reference(op, x, axis, flat=opset < 13)
        path = write(
            tmp_path / "m.onnx", op, {"x": x}, opset=opset, axis=axis, expected=[expected.astype(F32)]
        )
        (y,) = import_and_run(path, {"x": x})
        np.testing.assert_allclose(y, expected, rtol=3e-6, atol=1e-6)


def test_the_largest_of_axes_that_are_one(tmp_path: Path) -> None:
    x = BASE.astype(F32)
    for axis in range(len(SHAPE)):
        rows = x.reshape(int(np.prod(SHAPE[:axis])), -1)
        expected = (np.arange(rows.shape[1]) == rows.argmax(1)[:, None]).astype(F32).reshape(SHAPE)
        path = write(tmp_path / "m.onnx", "Hardmax", {"x": x}, opset=11, axis=axis, expected=[expected])
        np.testing.assert_array_equal(import_and_run(path, {"x": x})[0], expected)


def test_halves_with_logits_below_the_lowest_exponent(tmp_path: Path) -> None:
    x = (BASE - 1e4).astype(np.float16)
    for op in OPS:
        expected = reference(op, x, 3, flat=False)
        path = write(tmp_path / "m.onnx", op, {"x": x}, axis=-1, expected=[expected.astype(np.float16)])
        np.testing.assert_allclose(import_and_run(path, {"x": x})[0], expected, rtol=1e-3, atol=1e-3)


def attention(folder: Path, op: str, axis: int) -> tuple[Path, list[np.ndarray]]:
    """A file with logits about -200 between two products, and batches of its input."""
    rng = np.random.default_rng(1)
    stored: dict[str, Any] = {n: rng.normal(scale=0.3, size=(8, 8)).astype(F32) for n in "uw"}
    stored["low"] = F32([-200])
    nodes = [node("MatMul", "x u", "s"), node("Add", "s low", "t"), node(op, "t", "p", axis=axis)]
    proto = model([*nodes, node("MatMul", "p w", "y")], {"x": ["N", 4, 8]}, stored=stored)
    return save(proto, folder), [rng.normal(size=(2, 4, 8)).astype(F32) for _ in range(2)]


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("op", OPS)
def test_it_is_one_op_in_the_graph_and_in_the_file(tmp_path: Path, op: str, axis: int) -> None:
    path, batches = attention(tmp_path, op, axis)
    traced = qtrace.from_onnx(path)
    kinds = [call.kind for expr in exprs(traced) if (call := ops.read(expr)) is not None]
    assert kinds == ["add", op.lower()]  # besides the products, which are modules
    prepared = qtrace.prepare(traced, "w8a8")
    qtrace.calibrate(prepared, batches)
    qtrace.save(qtrace.convert(prepared), tmp_path / "int8.mge")
    converted = qtrace.load(tmp_path / "int8.mge")
    assert np.isfinite(converted(mge.Tensor(batches[0])).numpy()).all()
    file = qtrace.export(converted, tmp_path / "int8.onnx")
    written = {n.op_type for n in onnx.load(file).graph.node}
    assert written == {"QuantizeLinear", "DequantizeLinear", "MatMul", "Add", op}
    assert qtrace.verify(file, converted, batches).passed


def test_composites_of_a_softmax_keep_what_is_right() -> None:
    x = mge.Tensor((BASE - 200).astype(F32))
    value = mge.Tensor(np.ones((2, 3, 5, 5), F32))

    def pieces(x: mge.Tensor) -> mge.Tensor:
        powers = F.exp(x - F.max(x, axis=3, keepdims=True))
        return powers / F.sum(powers, axis=3, keepdims=True)

    prepared = qtrace.prepare(qtrace.trace(pieces, x), qtrace.QConfig())
    np.testing.assert_allclose(prepared(x).numpy(), pieces(x).numpy(), atol=1e-6)
    shares = functions.scaled_dot_product_attention(x, mge.Tensor(np.eye(5, dtype=F32)), value)
    np.testing.assert_allclose(shares.numpy(), 1.0, atol=1e-6)


def test_masked_rows_of_traced_attention() -> None:
    x = mge.Tensor(BASE[0].astype(F32))  # 3 samples, 4 tokens of 5 numbers
    weights = mge.Tensor(np.random.default_rng(2).normal(size=4 * 25).astype(F32))
    mask = mge.Tensor(np.full((3, 4, 4), -1e9, F32))
    options = {"attn_mask": mask, "qbias": False, "kbias": False, "vbias": False, "obias": False}
    result, _ = attention_in_parts(x, x, x, 5, 1, 0.0, 0.0, weights, **options)
    assert np.isfinite(result.numpy()).all()
