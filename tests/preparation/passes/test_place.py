"""Placement: time chooses, rules win, and the file still computes what the graph does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime
import pytest

import qtrace
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes import place as placing
from qtrace.preparation.passes._problem import build_problem
from qtrace.preparation.placement.labelling import Problem, Unit
from qtrace.preparation.prepare import plan
from tests.each import each_of
from tests.nets import images, net, randomize

X = images(1, 16, 24, 24, seed=3)


def _block(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    x = F.relu(self.first(x))
    x = F.relu(self.second(x))
    return self.third(x * 0.75 + 0.5)


def _traced() -> object:
    parts = {name: M.Conv2d(16, 16, 3, padding=1) for name in ("first", "second", "third")}
    return qtrace.trace(randomize(net(_block, **parts), 1), X, check=False)


class Table:
    """Times that a test sets: integer convolutions take ``share`` of the time in float."""

    def __init__(self, share: float = 0.3, change: float = 1e-6, small: float | None = None) -> None:
        self.share, self.change, self.small = share, change, small

    def seconds(self, op: object, form: str) -> float | None:
        if op.kind in ("quantize", "dequantize"):
            return self.change
        if op.kind == "reorder":
            return None
        if op.kind in ("sigmoid", "mul", "add") and form != "float":
            return self.small
        if op.kind == "conv2d":
            return 1e-3 * (1.0 if form == "float" else self.share)
        return 1e-4 if form == "float" else None


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """The table that `place` loads."""
    times = Table()
    monkeypatch.setattr(placing.CostTable, "packaged", classmethod(lambda cls, runtime: {runtime: times}))
    monkeypatch.setattr(placing.CostTable, "nearest", classmethod(lambda cls, runtime, flags: runtime))
    return times


def _states(config: dict[str, object]) -> dict[str, str]:
    return {note.kind: note.state for note in plan(_traced(), config).notes}


def test_what_has_no_integer_kernel_stays_float_and_everything_rounds_around_it(table: Table) -> None:
    fastest, everything = (_states({"placement": p}) for p in ("fastest", "everything"))
    assert (fastest["conv2d"], fastest["mul"], fastest["add"]) == ("int", "float", "float")
    assert (everything["mul"], everything["add"]) == ("int", "int")


@pytest.mark.parametrize("mode", ["fastest", "balanced", "small"])
@pytest.mark.parametrize("share", [1.2, 0.97])
def test_what_gains_too_little_time_is_quantized_for_its_size_only(
    mode: str, share: float, table: Table
) -> None:
    """Sums and products have no integer kernel: they stay float, as nobody asked for everything."""
    table.share = share
    explanation = qtrace.explain(_traced(), {"placement": mode})
    states = [(note.kind, note.state) for note in explanation.annotation.notes if note.state != "fused"]
    expected = "int" if mode == "small" else "float"
    assert [state for kind, state in states if kind == "conv2d"] == [expected] * 3
    assert {state for kind, state in states if kind in ("mul", "add")} == {"float"}
    summary = " ".join(explanation.summary().split())
    assert ("integers gain too little time" in summary) == (mode != "small")


def test_a_graph_that_takes_much_longer_on_integers_stays_float(
    table: Table, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table.share = 2.0
    prepared = qtrace.prepare(_traced(), {"placement": "balanced"})
    model = QuantizedModel(prepared)
    assert model.annotation.placement.mode == "float"
    assert not model.sites
    assert "the placement leaves the whole graph in float" in caplog.text
    assert "placement: everything" in caplog.text
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    qtrace.export(converted, tmp_path / "net.onnx")
    assert qtrace.verify(tmp_path / "net.onnx", converted, [X]).passed
    everything = qtrace.prepare(_traced(), {"placement": "everything"})
    assert QuantizedModel(everything).sites


def test_an_op_that_gains_no_time_stays_float_beside_one_that_does(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(op: object, form: str) -> float | None:
        slow = op.kind == "conv2d" and form == "integer" and op.weight[0] == 8
        return 2e-3 if slow else Table.seconds(table, op, form)

    monkeypatch.setattr(table, "seconds", seconds, raising=False)

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return self.b(self.a(x))

    module = randomize(net(forward, a=M.Conv2d(16, 16, 1), b=M.Conv2d(16, 8, 1)), 0)
    notes = plan(qtrace.trace(module, X, check=False), {"placement": "fastest"}).notes
    assert [note.state for note in notes] == ["int", "float"]
    assert "longer" in notes[1].reason


def test_a_rule_wins_over_the_placement(table: Table) -> None:
    rules = [
        {"match": {"name": "first"}, "quantize": False},
        {"match": {"op": "mul"}, "placement": "everything"},
    ]
    notes = {n.name: n for n in plan(_traced(), {"placement": "fastest", "rules": rules}).notes}
    convs = [n.state for n in notes.values() if n.kind == "conv2d"]
    assert convs == ["float", "int", "int"]
    assert {n.kind: n.state for n in notes.values()}["mul"] == "int"


@pytest.mark.parametrize(
    ("function", "pieces"), [("silu", ["sigmoid", "mul"]), ("hswish", ["add", "relu6", "mul", "mul"])]
)
def test_a_function_with_faster_integer_kernels_is_written_in_them(
    function: str, pieces: list[str], table: Table
) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return self.b(getattr(F, function)(self.a(x)))

    module = randomize(net(forward, a=M.Conv2d(16, 16, 1), b=M.Conv2d(16, 16, 1)), 0)
    traced = qtrace.trace(module, X, check=False)
    for table.small, kinds in ((1e-5, pieces), (None, [function])):
        prepared = qtrace.prepare(traced, {"placement": "fastest"})
        model = QuantizedModel(prepared)
        assert [note.kind for note in model.annotation.notes] == ["conv2d", *kinds, "conv2d"]
        np.testing.assert_allclose(prepared(mge.Tensor(X)).numpy(), module(mge.Tensor(X)).numpy(), atol=1e-5)


def test_hard_swish_on_integers_takes_a_sum_and_a_product(table: Table, tmp_path: Path) -> None:
    table.small = 1e-5
    module = net(lambda self, x: self.b(F.hswish(self.a(x))), a=M.Conv2d(16, 16, 1), b=M.Conv2d(16, 16, 1))
    prepared = qtrace.prepare(qtrace.trace(randomize(module, 0), X, check=False), {"placement": "fastest"})
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    file = tmp_path / "net.onnx"
    qtrace.export(converted, file)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(file), options)
    kinds = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    kernels = [kind for kind in kinds if kind != "Transpose"]
    ends = ["QuantizeLinear"], ["DequantizeLinear"]
    assert kernels == [*ends[0], "QLinearConv", "QLinearAdd", "QLinearMul", "QLinearConv", *ends[1]]
    report = qtrace.verify(file, converted, [X])
    assert report.worst_lsb() <= 1
    tallies = report.sites["op_by_op"].values()
    assert sum(t.equal for t in tallies) >= 0.9999 * sum(t.values for t in tallies)


def test_a_backend_without_times_quantizes_everything() -> None:
    traced = _traced()
    annotations = [plan(traced, {"backend": "tensorrt", "placement": p}) for p in ("fastest", "everything")]
    assert annotations[0] == annotations[1]
    assert annotations[0].placement is None


@pytest.mark.parametrize(
    ("backend", "table"), [("openvino", "openvino"), ("tflite", "litert"), ("ncnn", "ncnn")]
)
def test_every_backend_is_placed_by_the_table_of_its_runtime(backend: str, table: str) -> None:
    config = {"backend": backend, "placement": "fastest", "rules": [{"match": {}, "quantize_output": False}]}
    config = config if backend == "ncnn" else {**config, "rules": []}
    placement = plan(_traced(), config).placement
    assert placement.table == table
    assert 0 < placement.float_milliseconds < 10


@each_of(("backend", "free"), [("openvino", 1), ("ncnn", 1), ("onnxruntime", 0), ("tflite", 0)])
def test_kernels_write_floats_where_the_backend_says_so(backend: str, free: int, table: Table) -> None:
    """An activation function behind the first two stands between the kernel and a float result."""
    units = [unit for unit in _units({"backend": backend}) if unit.integer_seconds == 3e-4]
    assert [unit.float_result for unit in units] == [False, False, bool(free)]


def test_a_result_that_the_config_leaves_in_float_is_not_rounded(table: Table) -> None:
    units = _units({"backend": "ncnn", "rules": [{"match": {}, "quantize_output": False}]})
    assert [unit.float_result for unit in units if unit.integer_seconds == 3e-4] == [True] * 3


def _units(config: dict[str, object]) -> tuple[Unit, ...]:
    """Returns the units that `place` builds for a config."""
    captured: list[Problem] = []

    def build(view: object, chains: object, table: object) -> object:
        captured.append(build_problem(view, chains, table))
        return captured[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "build_problem", build)
        plan(_traced(), {**config, "placement": "fastest"})
    return captured[0].units


@pytest.mark.parametrize(("backend", "state"), [("onnxruntime", "float"), ("openvino", "int")])
def test_a_layer_that_must_write_floats_gains_where_a_kernel_does(
    backend: str, state: str, table: Table
) -> None:
    """onnxruntime computes a convolution whose result stays float in float: rounding only adds noise."""
    table.runtime = backend
    last = {"match": {"op": "conv2d", "position": "last"}, "quantize_output": False}
    notes = plan(_traced(), {"placement": "fastest", "backend": backend, "rules": [last]}).notes
    assert [n.state for n in notes if n.kind == "conv2d"] == ["int", "int", state]


def test_a_rule_does_not_change_the_time_of_what_only_moves_values(table: Table) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return F.sigmoid(F.flatten(F.relu(self.first(x)), 1).reshape(1, -1, 8))

    traced = qtrace.trace(randomize(net(forward, first=M.Conv2d(16, 16, 3)), 1), X, check=False)
    tail = {"match": {"position": "tail"}, "quantize": False}
    placements = [
        qtrace.explain(traced, {"placement": "fastest", "rules": rules}).annotation.placement
        for rules in ([], [tail])
    ]
    assert placements[0].float_milliseconds == placements[1].float_milliseconds


@each_of(
    ("config", "asked"),
    [
        ({"placement": "balanced"}, "balanced"),
        ({"rules": [{"match": {"op": "conv2d"}, "placement": "fastest"}]}, "fastest"),
        ({"placement": "everything"}, ""),
    ],
)
def test_explain_says_that_a_placement_has_no_effect_without_times(
    config: dict[str, Any], asked: str
) -> None:
    summary = " ".join(qtrace.explain(_traced(), {"backend": "tensorrt", **config}).summary().split())
    sentence = f"placement: {asked} does nothing: backend tensorrt lacks measured times"
    assert (sentence in summary) if asked else ("placement" not in summary)


def test_explain_says_the_times_of_an_op_and_of_the_whole(table: Table) -> None:
    explanation = qtrace.explain(_traced(), {"placement": "fastest"})
    name = next(note.name for note in explanation.annotation.notes if note.kind == "conv2d")
    why = str(explanation.why(name))
    assert "1 ms in float, 0.3 ms on integers" in why
    assert "in float it would take" in why
    summary = " ".join(explanation.summary().split())
    assert "fastest: 1.1 ms predicted" in summary
    assert "3.2 ms in float" in summary


@pytest.mark.parametrize("placement", ["fastest", "balanced"])
def test_the_file_computes_what_the_placed_graph_does(placement: str, table: Table, tmp_path: Path) -> None:
    prepared = qtrace.prepare(_traced(), {"placement": placement}, samples=[X])
    assert QuantizedModel(prepared).sites
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    file = tmp_path / "net.onnx"
    qtrace.export(converted, file)
    report = qtrace.verify(file, converted, [X])
    assert all(tally.worst <= 1 for tally in report.sites["op_by_op"].values())


@each_of(
    ("total", "change", "text"),
    [
        (1e-4, -0.9999999999e-4, " and remove all noise"),  # no op is left on integers
        (0.0, 1e-3, " and add the only noise (30.0 dB SQNR)"),  # all others are in float
        (0.0, 0.0, ""),
        (1e-4, 1e-7, ""),
        (1e-4, 1e-4, " and add 3.0 dB of noise"),
        (2e-4, -1e-4, " and remove 3.0 dB of noise"),
    ],
)
def test_the_clause_on_noise_is_a_ratio_only_where_there_is_one(
    total: float, change: float, text: str
) -> None:
    assert placing._describe_noise(total, change) == text
