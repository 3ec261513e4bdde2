"""OpenVINO's kernels are measured in the form that was asked for, or not at all."""

from __future__ import annotations

import pytest

from benchmarks.kernels import openvino_kernels, tables
from benchmarks.kernels.grid_small import small_grid
from benchmarks.kernels.openvino_kernels import cases_of, measure
from qtrace.costs import FLOAT, INTEGER, CostTable, OpShape

pytest.importorskip("openvino")

SHAPE = (1, 16, 6, 6)
CONV = OpShape("conv2d", (SHAPE,), (SHAPE,), (16, 16, 3, 3), (1, 1))
DIV = OpShape("div", (SHAPE, SHAPE), (SHAPE,))
POOL = OpShape("max_pool2d", (SHAPE,), ((1, 16, 3, 3),), (2, 2), (2, 2))
ADD = OpShape("add", (SHAPE, SHAPE), (SHAPE,))
QUANTIZE = OpShape("quantize", (SHAPE,), (SHAPE,))


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(openvino_kernels, "_SECONDS_PER_CASE", 0.0)


def _measure(monkeypatch, *grid):
    monkeypatch.setattr(openvino_kernels, "small_grid", lambda: grid)
    measurements, per_run = measure(cases_of())
    assert all(0 < m.seconds < 1 for m in measurements)
    assert 0 <= per_run < 1
    return {(m.op.kind, m.form) for m in measurements}


def test_kernels_of_both_forms(monkeypatch):
    grid = [(op, form) for op in (CONV, ADD, POOL) for form in (FLOAT, INTEGER)]
    assert _measure(monkeypatch, *grid) == {(op.kind, form) for op, form in grid}


def test_a_form_that_openvino_does_not_have_is_left_out(monkeypatch):
    assert _measure(monkeypatch, (DIV, INTEGER)) == set()
    assert _measure(monkeypatch, (DIV, FLOAT)) == {("div", FLOAT)}


def test_roundings_between_convolutions(monkeypatch):
    assert _measure(monkeypatch, (QUANTIZE, FLOAT)) == {("quantize", FLOAT), ("dequantize", FLOAT)}


def test_a_table_of_some_cases(monkeypatch, tmp_path):
    monkeypatch.setattr(openvino_kernels, "small_grid", lambda: [(CONV, FLOAT), (CONV, INTEGER)])
    done = []
    table = tables.measure_table("openvino", lambda count, whole: done.append((count, whole)))
    assert done == [(1, 2), (1, 2)]
    path = tmp_path / "table.json"
    path.write_text(table.to_json(), encoding="utf-8")
    assert CostTable.read(path).forms("conv2d") == (FLOAT, INTEGER)
    assert table.machine.runtime == "openvino"
    assert table.machine.version


def test_every_op_of_the_grid_is_measured_in_float():
    measured = {slot.op.kind for case in cases_of() for slot in case.slots if slot.form == FLOAT}
    assert measured - {"reorder"} == {op.kind for op, _ in small_grid()}
