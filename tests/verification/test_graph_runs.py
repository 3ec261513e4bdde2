"""Lanes: one run of a graph gives what three runs would, and computes what they share once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from megengine import Parameter, Tensor
from onnx import helper, numpy_helper

import qtrace
from qtrace.graph.types import TracedModule
from qtrace.preparation.phases import in_phase
from qtrace.targets.onnxruntime.runtime import OnnxSession
from qtrace.verification import graph_runs, runs
from qtrace.verification.graph_runs import FloatLane, Lanes, TakingLane
from qtrace.verification.other_sizes import _mirrored
from qtrace.verification.runtimes.base import RuntimeRun
from qtrace.verification.selections import FirstOfEquals
from qtrace.verification.tallies import DifferenceTally
from tests.each import each_of
from tests.nets import images, net


def _converted() -> TracedModule:
    """Returns a graph whose first convolution stays in float."""

    def forward(self: Any, x: Any) -> Any:
        return F.relu(self.b(F.relu(self.a(x))))

    module = net(forward, a=M.Conv2d(3, 4, 3), b=M.Conv2d(4, 4, 3))
    recipe = {"placement": "everything", "rules": [{"match": {"name": "*a_out*"}, "quantize": False}]}
    prepared = qtrace.prepare(qtrace.trace(module, Tensor(images(2, 3, 8, 8)), check=False), recipe)
    return qtrace.convert(qtrace.calibrate(prepared, [images(2, 3, 8, 8)], progress=False))


class _Shifted(FirstOfEquals):
    """Goes on with other values behind the first rounding."""

    def on_node(self, node: Any, value: Any) -> Any:
        return value + 0.25 if node.name.endswith("_q") and len(value) == 3 else value  # no weight


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_each_lane_has_the_outputs_of_its_own_run(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runs, "PART_BYTES", most)
    model, x = _converted(), Tensor(images(3, 3, 8, 8, seed=5))
    kinds = (FirstOfEquals, _Shifted, FloatLane)
    rounded, shifted, exact = (
        own[0].numpy() for own in Lanes(model).run([kind(model) for kind in kinds], (x,), {})
    )
    np.testing.assert_array_equal(rounded, FirstOfEquals(model).run(x).numpy())
    np.testing.assert_array_equal(shifted, _Shifted(model).run(x).numpy())
    with in_phase(model, "float"):
        np.testing.assert_array_equal(exact, FirstOfEquals(model).run(x).numpy())
    assert not np.array_equal(rounded, shifted)
    assert not np.array_equal(rounded, exact)
    np.testing.assert_array_equal(FirstOfEquals(model).run(x).numpy(), rounded)  # the phases are as before


def test_what_lanes_share_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _converted(), Tensor(images(2, 3, 8, 8))
    run, counts = Lanes(model), dict[Any, int]()
    plain = graph_runs.interpret

    def count(expr: Any, inputs: Any) -> Any:
        counts[expr] = counts.get(expr, 0) + 1
        return plain(expr, inputs)

    run.run([FirstOfEquals(model), FloatLane(model)], (x,), {})
    monkeypatch.setattr(graph_runs, "interpret", count)
    run.run([FirstOfEquals(model), FirstOfEquals(model)], (x,), {})
    assert set(counts.values()) == {1}
    assert len(counts) < len(model.graph._exprs)  # without parameters and their roundings


def test_a_size_shrinks_as_much_as_another_grows_unless_little_is_left() -> None:
    assert _mirrored({"x": (1, 3, 320, 320)}, {"x": (1, 3, 384, 448)}) == {"x": (1, 3, 256, 192)}
    assert _mirrored({"x": (1, 8)}, {"x": (1, 16)}) is None


def test_an_open_size_is_verified_larger_and_smaller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.a(x)

    x = Tensor(images(2, 3, 64, 64))
    module = net(forward, a=M.Conv2d(3, 4, 3))
    traced = qtrace.trace(module, x, dynamic={"x": {0: "N", 2: "H", 3: "W"}})
    prepared = qtrace.prepare(traced, {"placement": "everything"})
    qtrace.calibrate(prepared, [images(2, 3, 64, 64)], progress=False)
    converted = qtrace.convert(prepared)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    with caplog.at_level("INFO", "qtrace"):
        assert qtrace.verify(path, converted, [images(2, 3, 64, 64)]).passed
    sizes = [record.getMessage() for record in caplog.records if "is verified at" in record.getMessage()]
    assert len(sizes) == 2


def test_an_error_by_chance_at_another_size_neither_ends_the_call_nor_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MegEngine's AsyncError came once in some 40 runs of a detector, at a size at which it runs."""
    module = net(lambda self, x: self.a(x), a=M.Conv2d(3, 4, 3))
    x = images(2, 3, 64, 64)
    traced = qtrace.trace(module, Tensor(x), dynamic={"x": {0: "N", 2: "H", 3: "W"}})
    prepared = qtrace.prepare(traced, {"placement": "everything"})
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    plain, failed = Lanes.run, list[Any]()

    def run(lanes: Lanes, *given: Any) -> Any:
        values = plain(lanes, *given)
        if len(given[1][0]) == 1 and not failed:
            failed.append(given)
            raise RuntimeError("an async error is reported")
        return values

    expected = qtrace.verify(path, converted, [x]).to_dict()
    monkeypatch.setattr(Lanes, "run", run)
    assert qtrace.verify(path, converted, [x]).to_dict() == expected
    assert failed


def test_what_a_file_moves_of_a_parameter_is_compared_and_blamed_on_the_file(tmp_path: Path) -> None:
    """It depends on no batch, but the file computes it."""

    def forward(self: Any, x: Any) -> Any:
        weight = F.abs(self.e)
        return F.matmul(F.relu(F.matmul(x, weight)), F.transpose(weight, (1, 0)))

    random = np.random.default_rng(1)
    x = random.normal(size=(5, 16)).astype(np.float32)
    weight = Parameter(random.normal(size=(16, 24)).astype(np.float32))
    traced = qtrace.trace(net(forward, e=weight), Tensor(x), check=False)
    prepared = qtrace.prepare(traced, {"placement": "everything"})
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert "transpose_out" in qtrace.verify(path, converted, [x]).sites["op_by_op"]
    model = onnx.load(path)
    (place,) = (i for i, n in enumerate(model.graph.node) if n.op_type == "Transpose")
    moved = model.graph.node[place]
    mask, out = np.zeros((24, 16), np.bool_), moved.output[0]
    mask.flat[5], moved.output[0] = True, "moved"
    stored = {"mask": mask, "zero": np.float32(0)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in stored.items())
    model.graph.node.insert(place + 1, helper.make_node("Where", ["mask", "zero", "moved"], [out]))
    onnx.save(model, path)
    report = qtrace.verify(path, converted, [x])
    assert not report.passed
    assert any("transpose_out" in problem for problem in report.problems())
    assert report.cross_check is not None
    assert report.cross_check[1].side == "runtime"


def test_differences_are_counted() -> None:
    for kind in (np.uint8, np.uint16):
        graph = np.array([0, 0, 255, 7, 7, 7, *[0] * 400], kind)
        runtime = np.array([255, 0, 0, 9, 9, 6, *[0] * 400], kind)
        tally = DifferenceTally()
        assert tally.add(graph, runtime) == 255
        assert tally.add(graph, graph) == 0
        assert (tally.values, tally.equal, tally.worst) == (812, 807, 255)
        assert tally.histogram == {255: 1, -255: 1, 2: 2, -1: 1}


@each_of("kind", [np.uint8, np.int8])
@each_of(("share", "spread"), [(0.02, 1.0), (0.3, 1.0), (0.9, 90.0)])
def test_many_differences_are_counted_like_few(kind: Any, share: float, spread: float) -> None:
    random, info = np.random.default_rng(3), np.iinfo(kind)
    graph = random.integers(info.min, info.max, (3, 5, 7, 999), endpoint=True).astype(kind)
    steps = np.where(random.random(graph.shape) < share, random.normal(0, spread, graph.shape).round(), 0)
    runtime = np.clip(graph + steps, info.min, info.max).astype(kind)
    whole, apart = DifferenceTally(), DifferenceTally()
    worst = whole.add(graph, runtime)
    for one, other in zip(graph.astype(np.int32), runtime.astype(np.int32), strict=True):
        apart.add(one, other)
    assert whole == apart
    assert worst == whole.worst == np.abs(runtime.astype(int) - graph).max()
    assert sum(whole.histogram.values()) == whole.values - whole.equal > 0


def test_a_second_run_in_the_same_lanes_gives_what_a_run_alone_gives() -> None:
    model, x = _converted(), Tensor(images(3, 3, 8, 8, seed=5))
    run = Lanes(model)
    run.run([FirstOfEquals(model), FloatLane(model)], (x,), {})
    ((again,),) = run.run([_Shifted(model)], (x,), {})
    np.testing.assert_array_equal(again.numpy(), _Shifted(model).run(x).numpy())


class _Taking(TakingLane):
    """Takes the last rounding from elsewhere; goes on with other values behind the one before it if asked."""

    shift = 0.0

    def on_node(self, node: Any, value: Any) -> Any:
        return value + self.shift if node.name == "relu_out_q" and self.shift else value

    def takes(self, expr: Any) -> bool:
        return bool(expr.outputs[0].name == "relu_out_1_q")

    def take(self, expr: Any, inputs: Any) -> Any:
        return inputs[-1] * 0.0 + 7.5


class _ShiftedTaking(_Taking):
    shift = 0.25


@each_of("most", [0, 1 << 13, 1 << 30])
def test_a_lane_takes_results_where_its_inputs_are_its_own(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runs, "PART_BYTES", most)
    model, x = _converted(), Tensor(images(3, 3, 8, 8, seed=5))
    kinds = (FirstOfEquals, _ShiftedTaking, FloatLane, _Taking)
    run = Lanes(model, {"relu_out_q", "relu_out_1_q"})
    rounded, shifted, exact, same = (
        own[0].numpy() for own in run.run([kind(model) for kind in kinds], (x,), {})
    )
    np.testing.assert_array_equal(rounded, FirstOfEquals(model).run(x).numpy())
    np.testing.assert_array_equal(same, rounded)  # computed from the same values, once
    assert (shifted == 7.5).all()
    with in_phase(model, "float"):
        np.testing.assert_array_equal(exact, FirstOfEquals(model).run(x).numpy())
    ((alone,),) = run.run([_Taking(model)], (x,), {})
    assert (alone.numpy() == 7.5).all()


@pytest.mark.parametrize("keeps", [False, True])
def test_what_megengine_computes_while_integers_are_compared(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given to MegEngine before a value is read keeps who reads it waiting."""
    model, x, events = _converted(), Tensor(images(3, 3, 8, 8, seed=5)), list[str]()
    plain = graph_runs.interpret

    def note(expr: Any, inputs: Any) -> Any:
        events.append(f"compute {expr.outputs[0].name}")
        return plain(expr, inputs)

    class Compared(FirstOfEquals):
        keeps_values = keeps

        def on_node(self, node: Any, value: Any) -> Any:
            if node.name.endswith("out_q"):
                events.append(f"compare {node.name}")
            return value

    class Exact(FloatLane):
        def on_node(self, node: Any, value: Any) -> Any:
            if node.name.endswith("out"):
                events.append(f"float {node.name}")
            return value

    run = Lanes(model, {"a_out_q", "relu_out_q"})
    run.prepare((x,), {})
    monkeypatch.setattr(graph_runs, "interpret", note)
    (rounded,), (exact,) = run.run([Compared(model), Exact(model)], (x,), {})
    np.testing.assert_array_equal(rounded.numpy(), FirstOfEquals(model).run(x).numpy())
    with in_phase(model, "float"):
        np.testing.assert_array_equal(exact.numpy(), FirstOfEquals(model).run(x).numpy())
    compared = events.index("compare a_out_q")
    assert events.index("float a_out") < compared < events.index("float relu_out")
    assert (events.index("compute relu_out") < compared) == keeps


def test_roundings_by_numpy_count_what_megengine_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, x: Any) -> Any:
        return F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))))

    module = net(forward, a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 8, 3), c=M.Conv2d(8, 4, 3))
    prepared = qtrace.prepare(
        qtrace.trace(module, Tensor(images(2, 3, 16, 16)), check=False), {"placement": "everything"}
    )
    converted = qtrace.convert(qtrace.calibrate(prepared, [images(2, 3, 16, 16)], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    plain, taken = OnnxSession.run, list[str]()

    def run(session: Any, inputs: list[np.ndarray]) -> RuntimeRun:
        """Gives other integers, so that what is computed from them differs from the graph's by itself."""
        found = plain(session, inputs)
        for name in found.integers:
            levels = found.integers[name]
            random = np.random.default_rng(int(levels.sum()))  # runs may take turns in any order
            found.integers[name] = levels ^ (random.random(levels.shape) < 0.3).astype(levels.dtype)
        return found

    def take(lane: Any, expr: Any, inputs: Any) -> Any:
        taken.append(expr.outputs[0].name)
        return before(lane, expr, inputs)

    before = runs.OpByOp.take
    monkeypatch.setattr(OnnxSession, "run", run)
    monkeypatch.setattr(runs.OpByOp, "take", take)
    batches = [images(2, 3, 16, 16, seed=number) * 3 for number in range(3)]
    by_numpy = qtrace.verify(path, converted, batches, max_lsb=9, min_equal=0.0).to_dict()
    assert len(set(taken)) >= 2
    monkeypatch.setattr(runs, "_plain_roundings", lambda *args: {})
    taken.clear()
    assert qtrace.verify(path, converted, batches, max_lsb=9, min_equal=0.0).to_dict() == by_numpy
    assert taken == []
    assert by_numpy["histogram"]["op_by_op"]
