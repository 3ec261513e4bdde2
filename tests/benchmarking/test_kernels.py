"""Kernels are measured in the form that was asked for, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from qtrace.benchmarking import kernels, tables, written
from qtrace.benchmarking.cases import alone, between_convs, boundaries, conv, conv_branches
from qtrace.benchmarking.grid_convs import conv_cases
from qtrace.benchmarking.grid_others import other_cases
from qtrace.benchmarking.kernels import measure_cases, measure_run
from qtrace.benchmarking.net import Net
from qtrace.benchmarking.sessions import NodeRun
from qtrace.costs import FLOAT, INTEGER, LOOKUP, CostTable, OpShape
from qtrace.costs.families import families
from qtrace.errors import ExportError

SHAPE = (1, 16, 6, 6)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(kernels, "_MOST_ROUNDS", 6)


def _keys(measurements):
    return {(m.op.kind, m.form) for m in measurements}


@pytest.mark.parametrize("form", [FLOAT, INTEGER])
def test_convolutions(form):
    cases = [conv(form, 16, 32, 3, 5), conv_branches(form, 16, 16, 3, 4, groups=16)]
    measurements = measure_cases(cases)
    assert {m.form for m in measurements} == {form}
    assert [(m.op.weight, m.op.groups, m.op.outputs) for m in measurements] == [
        ((32, 16, 3, 3), 1, ((1, 32, 5, 5),)),
        ((16, 32, 3, 3), 1, ((1, 16, 5, 5),)),
        ((16, 1, 3, 3), 16, ((1, 16, 4, 4),)),
    ]
    assert all(0 < m.seconds < 1 for m in measurements)


def test_a_form_that_onnxruntime_does_not_have_is_left_out():
    op = OpShape("sub", (SHAPE, SHAPE), (SHAPE,))
    assert _keys(measure_cases([between_convs(op, INTEGER, written.node("Sub"))])) == set()
    assert _keys(measure_cases([between_convs(op, FLOAT, written.node("Sub"))])) == {("sub", FLOAT)}


def test_composites_and_look_ups():
    op = OpShape("silu", (SHAPE,), (SHAPE,))
    cases = [between_convs(op, form, written.UNARY["silu"]) for form in (FLOAT, LOOKUP)]
    assert _keys(measure_cases(cases)) == {("silu", FLOAT), ("silu", LOOKUP)}


def test_roundings_and_changes_of_layout():
    expected = {("quantize", FLOAT), ("dequantize", FLOAT), ("reorder", FLOAT), ("reorder", INTEGER)}
    assert _keys(measure_cases([boundaries(16, 6)])) == expected


@pytest.mark.parametrize("form", [FLOAT, INTEGER])
def test_linear_layers_with_a_bias(form):
    cases = []
    for lead in ((2,), (1, 5)):
        op = OpShape("linear", ((*lead, 8),), ((*lead, 16),), weight=(16, 8))
        cases.append(alone(op, form, written.linear(8, 16, len(lead) == 1)))
    assert len(measure_cases(cases)) == 2


def test_every_case_of_the_grid_is_a_network_of_its_kind(monkeypatch):
    for name in ("random", "weight", "bias"):  # the values would take half a minute
        monkeypatch.setattr(Net, name, lambda net, *_, **__: net.store(np.float32(1)))
    monkeypatch.setattr(Net, "serialize", lambda *_: b"")
    kinds = {slot.op.kind for case in (*conv_cases(), *other_cases()) for slot in case.slots}
    assert (
        set(written.UNARY) | {"conv2d", "conv_transpose2d", "linear", "matmul", "softmax", "concat"} <= kinds
    )
    ops = [slot.op for case in other_cases() for slot in case.slots if slot.op.kind == "reorder"]
    assert {family.name for op in ops for family in families(op)} == {"", "whole pages"}
    assert {"quantize", "dequantize", "reorder", "mean", "interpolate", "layer_norm", "max_pool2d"} <= kinds


def test_a_table_of_some_cases(monkeypatch, tmp_path):
    cases = [conv(FLOAT, 16, 16, 1, 4), conv(INTEGER, 16, 16, 1, 4)]
    monkeypatch.setattr(tables, "conv_cases", lambda: cases)
    monkeypatch.setattr(tables, "other_cases", lambda: [])
    done = []
    table = tables.measure_table("onnxruntime", lambda count, whole: done.append((count, whole)))
    assert done == [(2, 4), (2, 4)]
    path = tmp_path / "table.json"
    path.write_text(table.to_json(), encoding="utf-8")
    again = CostTable.read(path)
    assert again.forms("conv2d") == (FLOAT, INTEGER)
    assert again.machine.runtime == "onnxruntime"
    assert again.machine.processor
    assert again.machine.threads == 1


def test_a_run_takes_time_besides_its_nodes():
    assert 0 <= measure_run() < 0.01


def test_kernels_of_unknown_runtimes_are_refused():
    message = "kernels of 'tpu' cannot be measured.*supported: onnxruntime, openvino, litert, ncnn"
    with pytest.raises(ExportError, match=message):
        tables.measure_table("tpu")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(tables.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"needs the packages ai_edge_litert .*\[tflite\]"):
        tables.measure_table("litert")


def _run(*microseconds):
    return [NodeRun(f"m{i}.x", "Conv", time * 1e-6, ()) for i, time in enumerate(microseconds)]


def test_nodes_share_the_time_of_a_run_without_the_profile():
    """The profile adds 2 us to each node; another program interrupts one node of each run."""
    runs = [_run(12, 22, 32), _run(12, 22, 32), _run(12, 22, 900), _run(700, 22, 32), _run(12, 22, 32)]
    nodes = kernels._share_out(runs, 60e-6)
    assert [node.seconds for node in nodes] == pytest.approx([10e-6, 20e-6, 30e-6])


def test_nodes_that_were_slowed_down_in_all_runs_share_the_time_in_proportion():
    nodes = kernels._share_out([_run(1000, 3000)] * 4, 2e-3)
    assert [node.seconds for node in nodes] == pytest.approx([0.5e-3, 1.5e-3], rel=0.01)
