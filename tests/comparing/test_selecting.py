"""Networks that select: judged by rows, and precise where they select."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.comparing.groups import find_groups
from qtrace.comparing.runs import outputs_of
from qtrace.comparing.selections import SelectedShares, Share, TapedRun, find_selecting
from qtrace.comparing.sums import Outputs
from qtrace.graph.types import TracedModule
from qtrace.inspection.comparison.tallies import OutputTallies
from qtrace.preparation.annotation import ExprNote
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.placement.trials import RoundingTrial
from qtrace.sensitivity.diagnosis import JudgedOutputs, diagnose, judge_outputs
from qtrace.sensitivity.diagnosis.verdict import GOOD_FROM_DB, Verdict
from qtrace.sensitivity.simulation import Simulation
from tests.each import each_of
from tests.nets import net
from tests.selecting_nets import build, pictures

_EVERYTHING, _BALANCED = {"placement": "everything"}, {"placement": "balanced"}
# MegEngine's own F.gather ends the process in a queue: see the traps.
pytestmark = pytest.mark.usefixtures("synchronous")


def _top(self: M.Module, scores: mge.Tensor, rows: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
    best, index = F.topk(scores, 3, descending=True)
    wide = F.broadcast_to(F.expand_dims(index, 2), (*index.shape, rows.shape[2]))
    return best, F.gather(rows, 1, wide)


def test_replayed_rows_are_those_of_the_other_run() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1, 6, 4)).astype(np.float32)
    scores = np.array([[0.0, 255.0, 200.0, 100.5, 100.0, 50.0]], np.float32)  # steps of 1
    traced = qtrace.trace(net(_top), scores, rows, check=False)
    for given, wrong in (
        ([2, 1, 3], []),  # in another order
        ([1, 2, 4], []),  # 0.5 below the last that float selects: within a step
        ([1, 5, 2], [1]),  # 50.5 below
    ):
        run = TapedRun(traced, [np.array([given], np.int32)])
        best, picked = run.run(mge.Tensor(scores), mge.Tensor(rows))
        np.testing.assert_array_equal(best.numpy(), scores[:, given])
        np.testing.assert_array_equal(picked.numpy(), rows[:, given])
        shares = SelectedShares.of(traced)
        shares.add(run.tape.shares)
        assert shares.output(1) == pytest.approx(1 - len(wrong) / 3)
        _, blanked = shares.blank([best.numpy(), picked.numpy()], run.tape.shares)
        assert [not blanked[0, i].any() for i in range(3)] == [i in wrong for i in range(3)]


def test_a_mask_and_a_suppression_are_replayed() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return x[x[:, 0] > 0.0] * 2.0

    x = np.array([[1.0, 3.0], [-1.0, 4.0], [2.0, 5.0]], np.float32)
    traced = qtrace.trace(net(forward), x, check=False)
    run = TapedRun(traced, [np.array([True, True, False])])
    np.testing.assert_array_equal(run.run(mge.Tensor(x)).numpy(), x[:2] * 2.0)
    assert (run.tape.shares[0].right, run.tape.shares[0].places) == (1, 3)


def _notes(model: object) -> dict[str, ExprNote]:
    return {note.name: note for note in QuantizedModel(model).annotation.notes}  # type: ignore[arg-type]


@pytest.mark.slow
def test_scores_and_what_computes_with_picked_rows_stay_in_float() -> None:
    batches = [pictures(1, seed) for seed in range(2)]
    traced = qtrace.trace(build("rt_detr"), batches[0], check=False)
    notes = _notes(qtrace.prepare(traced, _BALANCED, samples=batches))
    decoder = [n for n in notes.values() if n.path.startswith("decoder") and n.kind in ("linear", "matmul")]
    memory = [n for n in decoder if n.path.endswith(("cross_attn.k_proj", "cross_attn.v_proj"))]
    behind = [n for n in decoder if n not in memory]
    assert behind
    assert memory
    assert all("selection" in note.causes for note in behind)
    assert not any("selection" in note.causes for note in memory)
    scores = [note for note in notes.values() if note.path == "enc_score"]
    assert scores
    assert not any(note.output for note in scores)
    rounded = _notes(qtrace.prepare(traced, _EVERYTHING, samples=batches))
    assert not any("selection" in note.causes for note in rounded.values())


def test_a_graph_without_selections_is_as_before() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return F.relu(self.conv(x))

    traced = qtrace.trace(net(forward, conv=M.Conv2d(3, 4, 3)), pictures(1, 0, 16), check=False)
    assert not SelectedShares.of(traced)


@pytest.mark.parametrize(
    "name", ["centernet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("yolov10", "rt_detr"))]
)
def test_rows_that_are_selected_stay_good(name: str, tmp_path: Path) -> None:
    batches = [pictures(4, seed) for seed in range(4)]
    traced = qtrace.trace(build(name), batches[0], check=False)
    prepared = qtrace.prepare(traced, _BALANCED, samples=batches[:2])
    prepared = qtrace.calibrate(prepared, batches, progress=False)
    test = [pictures(4, 500)]
    outputs = qtrace.compare(prepared, test).outputs
    assert min(output.sqnr_db for output in outputs) > GOOD_FROM_DB
    assert all(output.selected is not None and output.selected >= 0.9 for output in outputs)
    converted = qtrace.convert(prepared)
    report = qtrace.verify(qtrace.export(converted, tmp_path / "m.onnx"), converted, test)
    assert report.passed, report.summary()
    assert "of those that the graph selects" in report.summary()
    assert report.to_dict()["selected_rows"] >= 0.9


def test_places_of_the_largest_are_judged_by_agreement() -> None:
    batches = [pictures(4, seed) for seed in range(3)]
    traced = qtrace.trace(build("retrieval"), batches[0], check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, _EVERYTHING), batches, progress=False)
    index, vector = qtrace.compare(prepared, batches).outputs
    assert index.equal is not None
    assert index.selected == vector.selected
    assert "integers, " in index.lines()[0]
    assert "of the rows are selected in float, too" in vector.lines()[0]
    verdict = diagnose(prepared, batches, progress=False).verdict
    assert verdict.rows == pytest.approx(index.selected, abs=0.1)
    assert "of the rows selected as in float" in verdict.line()


@pytest.mark.parametrize(("rows", "word"), [(0.95, "good"), (0.8, "check"), (0.3, "broken")])
def test_the_verdict_tells_rows_that_are_others(rows: float, word: str) -> None:
    values = [[np.random.default_rng(0).normal(size=(8, 40))]]
    noisy = [[values[0][0] * 1.001]]
    judged = JudgedOutputs(find_groups(None, values), values, noisy, [8], [()], rows=rows)
    assert judge_outputs(judged, "samples").word == word


def test_trace_runs_gather_without_a_queue() -> None:
    mge.config.async_level = 2
    rng = np.random.default_rng(0)
    scores, rows = rng.normal(size=(4, 64)), rng.normal(size=(4, 64, 16))
    for _ in range(5):  # in a queue, one of two ends the process
        traced = qtrace.trace(net(_top), scores.astype(np.float32), rows.astype(np.float32), check=False)
    assert len(traced.graph.outputs) == 2


def _share_of_scores(scores: np.ndarray, given: np.ndarray, count: int) -> tuple[SelectedShares, Share]:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return F.topk(x, count, descending=True)

    traced = qtrace.trace(net(forward), scores, check=False)
    run = TapedRun(traced, [given.astype(np.int32)])
    run.run(mge.Tensor(scores))
    shares = SelectedShares.of(traced)
    shares.add(run.tape.shares)
    return shares, run.tape.shares[0]


@each_of("found", [0, 15, 20])
def test_objects_that_are_missed_among_much_background_are_counted(found: int) -> None:
    rng = np.random.default_rng(0)
    scores = rng.uniform(1e-3, 2e-3, (1, 400)).astype(np.float32)
    scores[:, 380:] = rng.uniform(0.8, 0.9, 20)  # 20 objects, and more places than objects
    background = rng.permutation(380)[: 100 - found]
    given = np.concatenate([380 + rng.permutation(20)[:found], background])[None]
    shares, share = _share_of_scores(scores, given, 100)
    assert (share.found, share.clear) == (found, 20)
    assert (share.right, share.places) == (80 + found, 100)
    assert share.wrong is None  # what is picked is as good as the last place of float's
    assert shares.worst() == found / 20


def test_objects_that_are_missed_are_no_less_lost_for_batches_that_are_right() -> None:
    shares = SelectedShares((frozenset({0}),), ("topk",)).empty()
    shares.add([Share(100, 100, None, 10, 10)])
    shares.add([Share(90, 100, None, 0, 10)])
    assert shares.worst() == 0.5
    assert shares.lost_db() == pytest.approx(3.01, abs=0.01)
    assert shares.empty().lost_db() == np.inf


def test_places_within_a_step_may_change() -> None:
    rng = np.random.default_rng(0)
    scores = np.linspace(0.0, 255.0, 64, dtype=np.float32)[None]
    scores[:, 20:44] = 100.0 + rng.uniform(0.0, 0.9, 24)  # about the last of 30 places, within a step
    best = np.arange(44, 64)
    for _ in range(4):
        shares, share = _share_of_scores(scores, np.r_[20 + rng.permutation(24)[:10], best][None], 30)
        assert share.wrong is None
        assert shares.worst() == 1.0
    missed, _ = _share_of_scores(scores, np.r_[20:31, best[1:]][None], 30)
    assert missed.worst() == 19 / 20


def test_the_verdict_holds_limits_to_lost_rows() -> None:
    verdict = Verdict("broken", math.inf, None, None, 0.0, None, 8, "samples").limited(20.0)
    assert not verdict.passed
    assert "exact" not in verdict.line()
    assert replace(verdict, rows=1.0).limited(20.0).passed
    assert replace(verdict, sqnr_db=40.0, rows=0.9).counted_db == pytest.approx(10.0)
    assert replace(verdict, sqnr_db=5.0, rows=0.9).counted_db == 5.0
    assert math.isnan(replace(verdict, sqnr_db=math.nan).counted_db)


def test_a_labelling_that_keeps_no_row_is_not_harmless() -> None:
    assert RoundingTrial().keeps(30.0)
    assert not RoundingTrial(selected=0.0).keeps(30.0)
    assert not RoundingTrial(20.0, "out").keeps(30.0)
    assert "0.0% of its rows" in RoundingTrial(selected=0.0).describe()


class _ScoresDie(M.Module):
    """Picks boxes by scores of a layer that a test breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = M.Conv2d(3, 8, 3, padding=1)
        self.score, self.box = M.Conv2d(8, 1, 1), M.Conv2d(8, 4, 1)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = F.relu(self.stem(x))
        scores = F.reshape(self.score(y), (y.shape[0], -1))
        boxes = F.transpose(F.reshape(self.box(y), (y.shape[0], 4, -1)), (0, 2, 1))
        index = F.topk(scores, 5, descending=True)[1]
        return F.gather(boxes, 1, F.broadcast_to(F.expand_dims(index, -1), (y.shape[0], 5, 4)))


def _with_dead_scores() -> tuple[TracedModule, list[np.ndarray]]:
    mge.random.seed(0)
    batches = [pictures(2, seed, 16) for seed in range(2)]
    traced = qtrace.trace(_ScoresDie(), batches[0], check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, _EVERYTHING), batches, progress=False)
    weight = QuantizedModel(prepared).fake_quants["score_weight"]
    weight.scale[...] = weight.scale.numpy() * 1e4
    return prepared, batches


def test_the_layer_that_destroys_a_selection_is_the_noisiest() -> None:
    prepared, batches = _with_dead_scores()
    simulation = Simulation(prepared, batches)
    noise = {layer.name: simulation.noise(layer) for layer in simulation.layers}
    assert noise["score_out"] > 0.5
    assert max(noise[name] for name in noise if name != "score_out") < 0.5
    assert simulation.noise() > 0.5
    assert simulation.value() < 3.0  # dB; equal rows alone would have far more
    assert simulation.only_group("score_weight") < 3.0
    assert simulation.value(["score_out"]) > simulation.value()
    names = [layer.name for layer in simulation.layers]
    assert simulation.answer(names).value > 80.0


def test_a_metric_of_the_users_own_sees_wrong_rows_as_errors() -> None:
    prepared, batches = _with_dead_scores()
    seen = []

    def compare(reference: Outputs, outputs: Outputs) -> float:
        seen.append((reference, outputs))
        return 0.0

    Simulation(prepared, batches, compare).value()
    (reference, outputs) = seen[0]
    blanked = [~batch[0].any(axis=-1) for batch in outputs]
    assert all(rows.any() for rows in blanked)
    assert all(batch[0][rows].any() for batch, rows in zip(reference, blanked, strict=True))


def test_compare_does_not_call_an_output_exact_that_has_no_row_of_floats() -> None:
    shares = SelectedShares((frozenset({0}),), ("topk",)).empty()
    shares.add([Share(0, 4)])
    prepared, _ = _with_dead_scores()
    tallies = OutputTallies(QuantizedModel(prepared), shares)
    nothing = np.zeros((2, 5, 4), np.float32)
    tallies.add([nothing], [nothing])
    (output,) = tallies.result()
    assert output.sqnr_db == -math.inf
    assert not output.informative
    assert "0.00% of the rows" in output.lines()[0]


def test_a_threshold_from_the_best_scores_selects_nothing_by_its_places() -> None:
    def forward(self: M.Module, scores: mge.Tensor, rows: mge.Tensor) -> mge.Tensor:
        best, _ = F.topk(scores, 3, descending=True)
        return rows * F.expand_dims((scores >= best[:, 2:]).astype("float32"), 2)

    scores = np.array([[0.0, 255.0, 200.0, 100.5, 100.0, 50.0]], np.float32)
    rows = np.random.default_rng(0).normal(size=(1, 6, 4)).astype(np.float32)
    traced = qtrace.trace(net(forward), scores, rows, check=False)
    assert find_selecting(traced) == ()
    # The best three in another order would make the second one the threshold.
    run = TapedRun(traced, [np.array([[3, 2, 1]], np.int32)])
    kept = run.run(mge.Tensor(scores), mge.Tensor(rows)).numpy()
    np.testing.assert_array_equal(kept.any(axis=2), scores >= 100.5)
    assert not run.tape.places


def test_rows_are_the_same_in_every_run_whatever_queue_the_caller_has() -> None:
    module = build("centernet")
    traced = qtrace.trace(module, mge.Tensor(pictures(1, 1)), check=False)
    batches = [pictures(4, 2)] * 6
    level, mge.config.async_level = mge.config.async_level, 2
    try:
        outputs = outputs_of(traced, batches)
        assert mge.config.async_level == 2
    finally:
        mge.config.async_level = level
    for batch in outputs[1:]:
        for value, first in zip(batch, outputs[0], strict=True):
            np.testing.assert_array_equal(value, first)
