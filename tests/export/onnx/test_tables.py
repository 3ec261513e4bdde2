"""Tables that a file stores in 8 bits stay so in the files that are made of it."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import numpy as np
import onnx
import onnxruntime
import pytest

import qtrace
from tests.importing.onnx.networks import model, node, save, weights

RANDOM = np.random.default_rng(0)
LEVELS = RANDOM.integers(-127, 128, (300, 32)).astype(np.int8)
ONE, ROWS = np.float32(0.013), RANDOM.uniform(0.01, 0.02, 300).astype(np.float32)
FORMS = {
    "before": ([node("DequantizeLinear", "t s", "d"), node("Gather", "d x", "e")], LEVELS, ONE),
    "before, by row": (
        [node("DequantizeLinear", "t s", "d", axis=0), node("Gather", "d x", "e")],
        LEVELS,
        ROWS,
    ),
    "before, by column": (
        [node("DequantizeLinear", "t s", "d", axis=1), node("Gather", "d x", "e")],
        LEVELS,
        ROWS[:32],
    ),
    "before, with a zero point": (
        [node("DequantizeLinear", "t s z", "d"), node("Gather", "d x", "e")],
        (LEVELS + 128).astype(np.uint8),
        ONE,
    ),
    "after": ([node("Gather", "t x", "d"), node("DequantizeLinear", "d s", "e")], LEVELS, ONE),
    "product": (
        [node("Cast", "t", "c", to=1), node("Mul", "c s", "d"), node("Gather", "d x", "e")],
        LEVELS,
        ONE,
    ),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("recipe", ["w8", "w8a8"])
@pytest.mark.parametrize("form", FORMS)
def test_tables_in_8_bits_stay_so(form: str, recipe: str, tmp_path: Path) -> None:
    nodes, levels, scale = FORMS[form]
    stored = {"t": levels, "s": scale, "w": weights(32, 8), "z": np.uint8(119)}
    proto = model(
        [*nodes, node("MatMul", "e w", "y")], {"x": ["n", 4]}, stored=stored, opset=13, dtypes={"x": np.int64}
    )
    source, x = save(proto, tmp_path), RANDOM.integers(0, 300, (16, 4))
    expected = onnxruntime.InferenceSession(source).run(None, {"x": x})[0]
    path = tmp_path / f"{recipe}.onnx"
    qtrace.quantize(source, x, path, recipe=recipe, progress=False, measure=False)
    tables = [t for t in onnx.load(path).graph.initializer if np.prod(t.dims) == levels.size]
    assert [t.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8) for t in tables] == [True]
    result = onnxruntime.InferenceSession(path).run(None, {"x": x})[0]
    assert np.abs(result - expected).mean() < 0.02 * np.abs(expected).max()


def test_a_table_of_integers_comes_back(tmp_path: Path) -> None:
    stored = {"d": LEVELS.astype(np.float32) * ROWS[:, None], "e": weights(300, 32)}
    nodes = [node("Gather", "d x", "a"), node("Gather", "e x", "b"), node("Add", "a b", "y")]
    source = save(model(nodes, {"x": [4]}, stored=stored, dtypes={"x": np.int64}), tmp_path)
    qtrace.export(qtrace.from_onnx(source), tmp_path / "float.onnx")
    kinds = sorted(
        t.data_type for t in onnx.load(tmp_path / "float.onnx").graph.initializer if t.dims[1:] == [32]
    )
    assert kinds == [onnx.TensorProto.FLOAT, onnx.TensorProto.INT8]
    x = np.array([0, 7, 299, 7])
    expected = onnxruntime.InferenceSession(source).run(None, {"x": x})[0]
    result = onnxruntime.InferenceSession(tmp_path / "float.onnx").run(None, {"x": x})[0]
    np.testing.assert_array_equal(result, expected)
    again = qtrace.from_onnx(tmp_path / "float.onnx")
    np.testing.assert_allclose(again(mge.Tensor(x.astype(np.int32))).numpy(), expected, rtol=1e-6)
