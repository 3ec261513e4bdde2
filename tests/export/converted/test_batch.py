"""The first axis is open in a file where the graph runs at other batch sizes, and only there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import qtrace
from tests.importing.onnx.networks import model, node, save, weights
from tests.nets import net

X = np.random.default_rng(0).standard_normal((1, 3, 4, 4)).astype(np.float32)


def _large(y: Any) -> Any:
    return y[y > 0.5]


# forward -> the shape of the input and of the output in the file
CASES: dict[str, tuple[Callable[..., Any], list[Any], list[Any]]] = {
    "closed by a reshape": (lambda s, x: s.l(F.reshape(s.c(x), (1, 64))), [1, 3, 4, 4], [1, 5]),
    "samples joined": (lambda s, x: F.reshape(s.c(x), (1, -1)), [1, 3, 4, 4], [1, 64]),
    "closed by a constant": (lambda s, x: s.c(F.concat([x, F.ones((1, 3, 4, 4))], axis=1)[:, :3]), [1], [1]),
    "open": (lambda s, x: s.l(F.reshape(s.c(x), (-1, 64))), ["N", 3, 4, 4], ["N", 5]),
    "rows of all samples": (lambda s, x: F.reshape(s.c(x), (-1, 16)), ["N", 3, 4, 4], [str, 16]),
    "a sum over the samples": (lambda s, x: s.c(x).sum(axis=0), ["N", 3, 4, 4], [4, 4, 4]),
    "time before samples": (lambda s, x: F.transpose(s.c(x), (1, 0, 2, 3)), ["N", 3, 4, 4], [4, "N", 4, 4]),
    "a stack of results": (lambda s, x: F.stack([s.c(x), F.exp(s.c(x))]), ["N", 3, 4, 4], [2, "N", 4, 4, 4]),
    "samples side by side": (lambda s, x: F.reshape(F.transpose(s.c(x), (1, 0, 2, 3)), (4, -1)), [1], [4]),
    "positions of the largest": (
        lambda s, x: F.reshape(F.topk(F.reshape(s.c(x), (-1, 16)), 2)[1], (-1, 4, 2)),
        ["N", 3, 4, 4],
        ["N", 4, 2],
    ),
    "as many as the values say": (lambda s, x: _large(s.c(x)), ["N", 3, 4, 4], [str]),
    "positions": (lambda s, x: F.argmax(s.c(x), axis=1), ["N", 3, 4, 4], ["N", 4, 4]),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("case", CASES)
def test_only_what_runs_at_other_sizes_is_open(case: str, tmp_path: Path) -> None:
    forward, read, given = CASES[case]
    module = net(forward, c=M.Conv2d(3, 4, 3, padding=1), l=M.Linear(64, 5))
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), {"ptq": []})
    qtrace.calibrate(prepared, [X], progress=False)
    qtrace.export(qtrace.convert(prepared), tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (source,), (result,) = session.get_inputs(), session.get_outputs()
    assert source.shape[: len(read)] == read
    for size, expected in zip(result.shape, given, strict=False):
        assert isinstance(size, str) if expected is str else size == expected
    count = 3 if source.shape[0] == "N" else 1
    (values,) = session.run(None, {source.name: np.repeat(X, count, axis=0)})
    traced = module(mge.Tensor(X)).shape
    assert values.shape == tuple(
        count if size == "N" else count * old if isinstance(size, str) else size
        for size, old in zip(result.shape, traced, strict=True)
    )


def test_a_table_of_the_batchs_size_is_no_batch(tmp_path: Path) -> None:
    module = net(lambda s, x, t: s.c(x) + F.reshape(t, (1, 4, 1, 1)), c=M.Conv2d(3, 4, 3))
    batch = np.repeat(X, 2, axis=0), np.ones((2, 2), np.float32)
    prepared = qtrace.prepare(qtrace.trace(module, *batch, check=False), {"ptq": []})
    qtrace.calibrate(prepared, [batch], progress=False)
    qtrace.export(qtrace.convert(prepared), tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    assert [i.shape for i in session.get_inputs()] == [["N", 3, 4, 4], [2, 2]]


SEARCHES = {
    "ArgMax": {"axis": 1, "keepdims": 0},
    "ArgMin": {"axis": -1, "keepdims": 1},
    "Greater": {},
    "Cast to int32": {"to": 6},
    "Cast to bool": {"to": 9},
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("search", SEARCHES)
def test_outputs_of_other_types_make_a_valid_file(search: str, tmp_path: Path) -> None:
    dtype = {"Greater": bool, "Cast to bool": bool, "Cast to int32": np.int32}.get(search, np.int64)
    proto = model(
        [
            node("Conv", "x c.weight", "a"),
            helper.make_node(
                search.split()[0], ["a", "k"] if search == "Greater" else ["a"], ["y"], **SEARCHES[search]
            ),
            node("Identity", "a", "y_Cast"),
        ],
        {"x": (1, 3, 8, 8)},
        ["y", "y_Cast", "a"],
        {"c.weight": weights(4, 3, 3, 3), "k": np.zeros(1, np.float32)},
        dtypes={"y": dtype},
    )
    path, x = save(proto, tmp_path), weights(1, 3, 8, 8, seed=1)
    prepared = qtrace.prepare(qtrace.from_onnx(path))
    qtrace.calibrate(prepared, [x], progress=False)
    converted = qtrace.convert(prepared)
    qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(tmp_path / "m.onnx", converted, [x], optimized=False).passed
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    expected = ReferenceEvaluator(str(path)).run(None, {"x": x})
    results = session.run(None, {"x": x})
    assert [o.name for o in session.get_outputs()] == ["y", "y_Cast", "a"]
    assert results[0].dtype == expected[0].dtype
    assert np.isclose(results[0].astype(float), expected[0].astype(float), atol=1).mean() > 0.9
