"""LiteRT's kernels are measured in the form that was asked for, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.kernels import copies, tables
from qtrace.costs import FLOAT, INTEGER, LOOKUP, CostTable, OpShape

pytest.importorskip("ai_edge_litert")

from ai_edge_litert.interpreter import Interpreter

from benchmarks.kernels import litert_kernels

SHAPE = (1, 16, 6, 6)
CONV = OpShape("conv2d", (SHAPE,), (SHAPE,), (16, 16, 3, 3), (1, 1))


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(copies, "_MOST_ROUNDS", 1)


def _smallest():
    """The first op of each kind and form in the grid."""
    found = {}
    for op, form in litert_kernels.grid():
        found.setdefault((op.kind, form), (op, form))
    return list(found.values())


def test_litert_measures_every_kind_with_an_operator(monkeypatch):
    pairs = _smallest()
    monkeypatch.setattr(litert_kernels, "grid", lambda: pairs)
    measurements, per_run = litert_kernels.measure(lambda count, whole: None)
    assert 0 < per_run < 1
    measured = {(m.op.kind, m.form) for m in measurements}
    expected = {(op.kind, form) for op, form in pairs}
    assert expected - measured == {("hsigmoid", FLOAT), ("hsigmoid", INTEGER), ("silu", INTEGER)}
    assert ("sigmoid", LOOKUP) in measured
    assert all(0 < m.seconds < 1 for m in measurements)


@pytest.mark.parametrize("form", [FLOAT, INTEGER])
def test_all_tensors_between_the_ops_have_the_type_of_the_form(form):
    model = litert_kernels._write(CONV, form, 2)
    loaded = Interpreter(model_content=model)
    loaded.allocate_tensors()
    kind = np.float32 if form == FLOAT else np.int8
    details = [*loaded.get_input_details(), *loaded.get_output_details()]
    assert [detail["dtype"] for detail in details] == [kind] * 3


def test_a_table_of_some_cases(monkeypatch, tmp_path):
    monkeypatch.setattr(litert_kernels, "grid", lambda: [(CONV, FLOAT), (CONV, INTEGER)])
    done = []
    table = tables.measure_table("litert", lambda count, whole: done.append((count, whole)))
    assert done == [(1, 4)] * 4
    path = tmp_path / "table.json"
    path.write_text(table.to_json(), encoding="utf-8")
    assert CostTable.read(path).forms("conv2d") == (FLOAT, INTEGER)
    assert table.machine.runtime == "litert"
