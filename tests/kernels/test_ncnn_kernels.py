"""ncnn's kernels are measured: convolutions and linear layers in both forms, all else in float."""

from __future__ import annotations

import pytest

from benchmarks.kernels import copies, tables
from qtrace.costs import FLOAT, INTEGER, CostTable, OpShape

ncnn = pytest.importorskip("ncnn")

from benchmarks.kernels import ncnn_kernels  # noqa: E402

SHAPE = (1, 16, 6, 6)
CONV = OpShape("conv2d", (SHAPE,), (SHAPE,), (16, 16, 3, 3), (1, 1))


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(copies, "_MOST_ROUNDS", 1)


def test_every_kind_of_the_grid_runs(monkeypatch):
    smallest = {}
    for op, form in ncnn_kernels.grid():
        smallest.setdefault((op.kind, form), (op, form))
    monkeypatch.setattr(ncnn_kernels, "grid", lambda: list(smallest.values()))
    measurements, per_run = ncnn_kernels.measure(lambda count, whole: None)
    assert {(m.op.kind, m.form) for m in measurements} == set(smallest)
    assert {kind for kind, form in smallest if form == INTEGER} == {"conv2d", "linear"}
    assert 0 < per_run < 1


@pytest.mark.parametrize("op", [op for op, form in ncnn_kernels.grid() if form == INTEGER][::30])
def test_integer_layers_write_integers_or_floats_of_the_right_shape(op):
    (results,) = [ncnn_kernels.open_network(op, INTEGER, 1)()]
    (code, result), kind = results[0], op.kind
    assert code == 0
    values = result.w * result.h * result.c * result.elempack
    expected = 1
    for size in op.outputs[0]:
        expected *= size
    assert values == expected
    assert result.elemsize / result.elempack == (1 if kind == "conv2d" else 4)


def test_a_table_of_some_cases(monkeypatch, tmp_path):
    monkeypatch.setattr(ncnn_kernels, "grid", lambda: [(CONV, FLOAT), (CONV, INTEGER)])
    done = []
    table = tables.measure_table("ncnn", lambda count, whole: done.append((count, whole)))
    assert done == [(1, 4)] * 4
    path = tmp_path / "table.json"
    path.write_text(table.to_json(), encoding="utf-8")
    assert CostTable.read(path).forms("conv2d") == (FLOAT, INTEGER)
    assert table.machine.runtime == "ncnn"
