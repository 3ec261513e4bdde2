"""Networks that run step by step: tokens and a state go in and out, a setting is one number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import qtrace
from qtrace.data import open_data
from qtrace.errors import DataError
from qtrace.graph.open_axes import SizedTypes, open_shapes, read_open_axes
from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.quantizing import sources
from qtrace.sensitivity.diagnosis import measure_inputs
from tests.each import each_of
from tests.importing.onnx.networks import model, node, save, weights
from tests.importing.onnx.test_open_axes import declared

_INPUTS = {"token": ["b", "steps"], "state": [1, "b", 8], "rate": []}


def _step(rows: int = 20) -> onnx.ModelProto:
    """A decoder's step: embedding, GRU with its state in and out, and a number that scales the result."""
    nodes = [
        node("Gather", "table token", "rows"),
        node("Transpose", "rows", "time_first", perm=[1, 0, 2]),
        node("GRU", "time_first w r bias _ state", "every last", hidden_size=8),
        node("Squeeze", "every one", "features"),
        node("MatMul", "features head", "y"),
        node("Cast", "rate", "factor", to=onnx.TensorProto.FLOAT),
        node("Mul", "y factor", "z"),
        node("Transpose", "z", "logits", perm=[1, 0, 2]),
    ]
    stored = {"table": weights(rows, 6), "w": weights(1, 24, 6), "r": weights(1, 24, 8)}
    stored |= {"bias": weights(1, 48), "head": weights(8, 5), "one": np.array([1])}
    integers = {"token": np.int64, "rate": np.int64}
    proto = model(nodes, _INPUTS, ("logits", "last"), stored, dtypes=integers)
    for value, sizes in zip(proto.graph.output, (["b", "steps", 5], [1, "b", 8]), strict=True):
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, sizes))
    return proto


def _batch(seed: int, samples: int, steps: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    token = random.integers(0, 20, (samples, steps))
    state = random.standard_normal((1, samples, 8)).astype(np.float32)
    return {"token": token, "state": state, "rate": np.array(2)}


def test_quantize_keeps_state_setting_and_sizes_of_a_step(tmp_path: Path) -> None:
    path = save(_step(), tmp_path)
    data = [_batch(seed, 1 + seed % 2, 3) for seed in range(4)]
    config = {"placement": "everything"}
    out = tmp_path / "int8.onnx"
    result = qtrace.quantize(path, data, out, recipe=config, measure=False, progress=False)
    assert result.verify is not None
    assert result.verify.passed
    assert declared(out) == declared(path)
    for batch in (_batch(7, 1, 1), _batch(8, 3, 5)):
        session = open_session(path, SessionSettings(threads=1))
        expected, values = session.run(None, batch), open_session(out).run(None, batch)
        for value, exact in zip(values, expected, strict=True):
            assert (value.shape, value.dtype) == (exact.shape, exact.dtype)
            assert np.corrcoef(value.reshape(-1), exact.reshape(-1))[0, 1] > 0.8


def test_a_table_has_no_rows_for_some_sizes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Sizes whose positions a table lacks are left out, without a word of MegEngine's."""
    nodes = [
        node("Shape", "token", "shape"),
        node("Gather", "shape last", "steps"),
        node("Range", "zero steps one", "places"),
        node("Gather", "positions places", "p"),
        node("Gather", "table token", "t"),
        node("Add", "t p", "y"),
    ]
    stored = {"positions": weights(16, 6), "table": weights(20, 6), "zero": np.array(0), "one": np.array(1)}
    stored["last"] = np.array(1)
    proto = model(nodes, {"token": ["b", "steps"]}, stored=stored, dtypes={"token": np.int64})
    net = qtrace.from_onnx(save(proto, tmp_path), {"token": (1, 8)})
    record = read_open_axes(net)
    assert record is not None
    capfd.readouterr()
    known = SizedTypes(net).at_other_sizes(record.axes)
    assert len(known) < 3
    assert open_shapes(net)[net.graph.outputs[0].name] == ("b", "steps", 6)
    assert "ERR" not in capfd.readouterr().err


def test_shapes_of_a_sample_follow_the_names_of_axes(tmp_path: Path) -> None:
    path = save(_step(), tmp_path)
    assert sources.open_shapes(path, _batch(0, 3, 4)) == {"token": (1, 4), "state": (1, 1, 8)}
    values = tuple(_batch(0, 3, 4).values())
    assert sources.open_shapes(path, values) == {"token": (1, 4), "state": (1, 1, 8)}
    edges = {"atoms": [1, 4], "rates": ["?", 3], "pairs": [2, "edges"], "kinds": ["edges", 3]}
    proto = model([node("Add", "rates kinds", "y")], edges)
    batch = {
        k: np.ones(s, np.float32) for k, s in {"rates": (5, 3), "pairs": (2, 7), "kinds": (7, 3)}.items()
    }
    shapes = sources.open_shapes(save(proto, tmp_path, "graph.onnx"), batch)
    assert shapes == {"rates": (1, 3), "pairs": (2, 7), "kinds": (7, 3)}
    nodes = {"atoms": ["nodes", 4], "pairs": [2, "edges"], "kinds": ["edges", 3]}
    path = save(
        model([node("Relu", "atoms", "y")], nodes, dtypes={"pairs": np.int64}), tmp_path, "nodes.onnx"
    )
    batch = {"atoms": np.ones((5, 4)), "pairs": np.ones((2, 7), np.int64), "kinds": np.ones((7, 3))}
    assert sources.open_shapes(path, batch) == {"atoms": (5, 4), "pairs": (2, 7), "kinds": (7, 3)}
    batch["pairs"] = np.ones((2, 7))  # no places: the first axis of the others may count samples
    assert sources.open_shapes(path, batch)["atoms"] == (1, 4)


@each_of("sizes", [["?", 3, "?", "?"], ["N", 3, "N", "N"], ["n", 3, 32, "n"], ["N", 3, "H", "W"]])
@each_of("count", [4, 32])
def test_an_image_has_its_size_where_a_file_names_all_axes_alike(tmp_path: Path, sizes, count: int) -> None:
    path = save(model([node("Relu", "x", "y")], {"x": sizes}), tmp_path)
    batch = (np.ones((count, 3, 32, 32), np.float32),)
    assert sources.open_shapes(path, batch) == {"x": (1, 3, 32, 32)}


def test_a_state_before_the_samples_counts_them_on_its_second_axis(tmp_path: Path) -> None:
    path = save(model([node("Relu", "x", "y")], {"h": [1, "N", 8], "x": ["N", 3, 16]}), tmp_path)
    for count in (1, 4):
        batch = {"h": np.ones((1, count, 8), np.float32), "x": np.ones((count, 3, 16), np.float32)}
        assert sources.open_shapes(path, batch) == {"h": (1, 1, 8), "x": (1, 3, 16)}


def test_a_number_beside_arrays_is_a_setting() -> None:
    x = np.ones((6, 2), np.float32)
    for data in (
        [{"x": x, "rate": 16000}],
        [{"x": x, "rate": np.int64(16000)}],
        {"x": x, "rate": np.array(16000)},
    ):
        batch = next(iter(open_data(data, batch_size=8)))
        assert batch["rate"].shape == ()
        assert int(batch["rate"]) == 16000
        assert batch["x"].shape == (6, 2)
    with pytest.raises(DataError, match="is a single number"):
        next(iter(open_data([np.float32(3)], batch_size=8)))


def test_inputs_whose_second_axis_differs_have_one_channel() -> None:
    """Sounds of several lengths, and states of several samples, can be compared with other data."""
    random = np.random.default_rng(0)
    sounds = [{"x": random.standard_normal((2, steps)).astype(np.float32)} for steps in (30, 50, 40)]
    (statistics,) = measure_inputs(sounds)
    values = np.concatenate([batch["x"].reshape(-1) for batch in sounds])
    assert statistics.samples == 6
    np.testing.assert_allclose(statistics.mean, [values.mean()], rtol=1e-4)
    np.testing.assert_allclose(statistics.deviation, [values.std()], rtol=1e-4)


def test_a_number_in_an_npz_is_given_with_each_batch(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, sr=np.int64(16000), x=np.arange(15, dtype=np.float32).reshape(5, 3))
    batches = list(open_data(str(path), batch_size=2))
    assert [batch["x"].shape for batch in batches] == [(2, 3), (2, 3), (1, 3)]
    assert all(batch["sr"].shape == () and batch["sr"] == 16000 for batch in batches)
    np.savez(path, sr=np.int64(16000))
    with pytest.raises(DataError, match=r"data\.npz\[sr\] is a single number"):
        open_data(str(path), batch_size=2)
