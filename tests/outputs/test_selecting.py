"""Networks that select: judged by rows, and precise where they select."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.outputs.replay import SelectedShares, TapedRun
from qtrace.preparation.annotation import ExprNote
from qtrace.preparation.model import QuantizedModel
from qtrace.sensitivity.diagnosis import diagnose
from qtrace.sensitivity.diagnosis.verdict import judge
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
        blanked = shares.blank(1, picked.numpy(), run.tape.shares)
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
def test_rows_that_are_selected_keep_30_db(name: str, tmp_path: Path) -> None:
    batches = [pictures(4, seed) for seed in range(4)]
    traced = qtrace.trace(build(name), batches[0], check=False)
    prepared = qtrace.prepare(traced, _BALANCED, samples=batches[:2])
    prepared = qtrace.calibrate(prepared, batches, progress=False)
    test = [pictures(4, 500)]
    outputs = qtrace.compare(prepared, test).outputs
    assert min(output.sqnr_db for output in outputs) > 28
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
    assert "of the selected rows are float's" in verdict.line()


def test_the_verdict_tells_rows_that_are_others() -> None:
    assert judge(40.0, rows=0.95) == "good"
    assert judge(40.0, rows=0.8) == "check"
    assert judge(40.0, rows=0.3) == "broken"


def test_trace_runs_gather_without_a_queue() -> None:
    mge.config.async_level = 2
    rng = np.random.default_rng(0)
    scores, rows = rng.normal(size=(4, 64)), rng.normal(size=(4, 64, 16))
    for _ in range(5):  # in a queue, one of two ends the process
        traced = qtrace.trace(net(_top), scores.astype(np.float32), rows.astype(np.float32))
    assert len(traced.graph.outputs) == 2
