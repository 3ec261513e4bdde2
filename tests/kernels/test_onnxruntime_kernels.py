"""Kernels are measured in the form that was asked for, or not at all."""

from __future__ import annotations

import megengine
import megengine.module as M
import numpy as np
import onnx
import pytest

import qtrace
from benchmarks.kernels import graphs, tables
from benchmarks.kernels import onnxruntime_kernels as kernels
from benchmarks.kernels.__main__ import main
from benchmarks.kernels.cases import alone, between_convs, boundaries, conv, conv_branches
from benchmarks.kernels.graphs import FUNCTIONS
from benchmarks.kernels.grid_convs import conv_cases
from benchmarks.kernels.grid_others import other_cases
from benchmarks.kernels.onnxruntime_kernels import measure_cases, measure_run
from qtrace.benchmarking.profile import NodeRun
from qtrace.costs import FLOAT, INTEGER, LOOKUP, PLAIN_MAX_POOL, CostTable, OpShape, families
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
    assert _keys(measure_cases([between_convs(op, INTEGER)])) == set()
    assert _keys(measure_cases([between_convs(op, FLOAT)])) == {("sub", FLOAT)}


def test_composites_and_look_ups():
    """SiLU has no look-up in the file: the export writes it in float, between roundings."""
    silu, sigmoid = (OpShape(kind, (SHAPE,), (SHAPE,)) for kind in ("silu", "sigmoid"))
    cases = [between_convs(op, form) for op in (silu, sigmoid) for form in (FLOAT, LOOKUP)]
    assert _keys(measure_cases(cases)) == {("silu", FLOAT), ("sigmoid", FLOAT), ("sigmoid", LOOKUP)}


def test_ops_that_move_integers_do_so_by_themselves():
    moved = OpShape("reshape", (SHAPE,), ((1, 16 * 36),))
    plain = OpShape(PLAIN_MAX_POOL, (SHAPE,), ((1, 16, 3, 3),), (2, 2), (2, 2))
    softmax = OpShape("softmax", ((1, 4, 8),), ((1, 4, 8),))
    measurements = measure_cases([alone(op, INTEGER) for op in (moved, plain, softmax)])
    assert _keys(measurements) == {("reshape", INTEGER), (PLAIN_MAX_POOL, INTEGER), ("softmax", INTEGER)}


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", [FLOAT, INTEGER])
def test_a_kernel_is_that_of_the_file_that_is_shipped(form, tmp_path):
    """With its roundings, the type of its weights, and its open batch."""
    image = np.random.default_rng(0).normal(size=(1, 16, 6, 6)).astype(np.float32)
    net = M.Sequential(M.Conv2d(16, 16, 3, padding=1), M.ReLU())
    net.eval()
    graph = qtrace.trace(net, image, check=False)
    if form == INTEGER:
        graph = qtrace.prepare(graph, {"backend": "onnxruntime"})
        graph = qtrace.convert(qtrace.calibrate(graph, [image], progress=False))
    shipped = onnx.load(qtrace.export(graph, tmp_path / "net.onnx"))
    measured = onnx.load_from_string(conv(form, 16, 16, 3, 6).write_onnx()[0])
    (ours,), (theirs,) = (
        {(tuple(sorted(_types(model, node))), model.opset_import[0].version) for node in _convs(model)}
        for model in (measured, shipped)
    )
    assert ours == theirs


def test_kernels_leave_the_random_numbers_of_training_as_they_are():
    drawn = []
    for write in (lambda: None, lambda: conv(INTEGER, 16, 16, 1, 4).write_onnx()):
        megengine.random.seed(3)
        write()
        drawn.append(megengine.random.normal(size=(4,)).numpy())
    np.testing.assert_array_equal(*drawn)


def _convs(model):
    return [node for node in model.graph.node if node.op_type == "Conv"]


def _types(model, node):
    """The types of what the DequantizeLinears before a node read."""
    stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    sources = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "DequantizeLinear"}
    return [str(stored.get(sources.get(name, name))) for name in node.input]


def test_roundings_and_changes_of_layout():
    expected = {("quantize", FLOAT), ("dequantize", FLOAT), ("reorder", FLOAT), ("reorder", INTEGER)}
    assert _keys(measure_cases([boundaries(16, 6)])) == expected


@pytest.mark.parametrize("form", [FLOAT, INTEGER])
def test_linear_layers_with_a_bias(form):
    cases = []
    for lead in ((2,), (1, 5)):
        op = OpShape("linear", ((*lead, 8),), ((*lead, 16),), weight=(16, 8))
        cases.append(alone(op, form))
    assert len(measure_cases(cases)) == 2


def test_the_grid_has_every_kind_of_op():
    kinds = {slot.op.kind for case in (*conv_cases(), *other_cases()) for slot in case.slots}
    assert set(FUNCTIONS) | {"conv2d", "conv_transpose2d", "linear", "matmul", "softmax", "concat"} <= kinds
    ops = [slot.op for case in other_cases() for slot in case.slots if slot.op.kind == "reorder"]
    assert {family.name for op in ops for family in families(op)} == {"", "whole pages"}
    assert {"quantize", "dequantize", "reorder", "mean", "interpolate", "layer_norm", "max_pool2d"} <= kinds


def test_every_kind_of_the_grid_is_written():
    small = {(s.op.kind, s.op.stored, c.form): c for c in reversed(list(other_cases())) for s in c.slots}
    for (kind, _, form), case in small.items():
        graph = graphs.build(case.parts)
        names = {node.name for node in graph.graph.nodes(recursive=False)}
        if kind not in ("quantize", "dequantize", "reorder"):
            assert "m0" in names, (kind, form)


def test_ops_of_one_channel_are_written():
    """A convolution of one channel by itself has one group, and no axis of groups."""
    cases = reversed(list(other_cases()))
    single = {s.op.kind: case for case in cases for s in case.slots if s.op.outputs[0][1:2] == (1,)}
    assert "conv_transpose2d" in single
    for kind, case in single.items():
        assert case.write_onnx()[0], kind


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


def test_the_command_writes_a_table_that_predicts(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tables, "conv_cases", lambda: [conv(FLOAT, 16, 16, 1, 4)])
    monkeypatch.setattr(tables, "other_cases", lambda: [])
    path = tmp_path / "table.json"
    monkeypatch.setattr("sys.argv", ["benchmarks.kernels", "-o", str(path)])
    main()
    assert capsys.readouterr().out == f"{path}\n"
    table = CostTable.read(path)
    assert table.forms("conv2d") == (FLOAT,)
    (measured,) = table.measurements
    assert table.seconds(measured.op, FLOAT) > 0
