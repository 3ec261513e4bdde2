"""Networks whose number of rows depends on values: what is said where an LSB changes it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.sensitivity import analyze
from qtrace.verification.report import VerifyReport
from qtrace.verification.selections import Ranked, find_selections
from tests.nets import images, net


def _masked(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
    """Scores over a threshold, and what a quantized layer makes of each of them."""
    hidden = F.relu(self.hidden(x))
    scores = F.flatten(self.scores(hidden))
    kept, _ = F.cond_take(scores > self.threshold, scores)
    return F.flatten(hidden, 1), self.head(F.reshape(kept, (-1, 1)))


def _suppressed(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
    """Boxes that non-maximum suppression keeps, and what a quantized layer makes of each of them."""
    hidden = F.relu(self.hidden(x))
    values = F.reshape(F.transpose(self.scores(hidden), (0, 2, 3, 1)), (-1, 4))
    corner = F.abs(values[:, :2])
    boxes = F.concat([corner, corner + F.abs(values[:, 2:]) + 0.1], axis=1)
    kept = F.vision.nms(boxes, values[:, 0], 0.5)
    return F.flatten(hidden, 1), self.head(values[kept])


@pytest.fixture(scope="module", params=["cond_take", "nms"])
def selecting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TracedModule, TracedModule, Path, list[np.ndarray]]:
    mge.random.seed(5)
    masked = request.param == "cond_take"
    module = net(
        _masked if masked else _suppressed,
        hidden=M.Conv2d(4, 8, 3, padding=1),
        scores=M.Conv2d(8, 4, 3, padding=1),
        head=M.Linear(1 if masked else 4, 3),
    )
    module.threshold = 0.0
    batches = [images(2, 4, 8, 8, seed=s) for s in range(2)]
    traced = qtrace.trace(module, batches[0], check=False)
    converted = qtrace.convert(qtrace.calibrate(qtrace.prepare(traced), batches, progress=False))
    path = qtrace.export(converted, tmp_path_factory.mktemp("m") / "m.onnx")
    return traced, converted, path, batches


def _shift(converted: TracedModule, path: Path, steps: float) -> Path:
    """Writes the file with the bias of the scores moved by some steps of the scores."""
    model = onnx.load(path)
    tensors = {t.name: t for t in model.graph.initializer}
    scale = next(s.qparams.scale for s in QuantizedModel(converted).sites if s.name == "scores_out")
    bias, bias_scale = (numpy_helper.to_array(tensors[f"scores_bias_{n}"]) for n in ("int", "scale"))
    moved = (bias + np.round(steps * scale / bias_scale)).astype(bias.dtype)
    tensors["scores_bias_int"].CopyFrom(numpy_helper.from_array(moved, "scores_bias_int"))
    changed = path.with_name(f"shifted_{steps}.onnx")
    onnx.save(model, changed)
    return changed


def test_rows_that_an_lsb_selects_are_said_and_the_rest_is_compared(
    selecting: tuple[TracedModule, TracedModule, Path, list[np.ndarray]],
) -> None:
    _, converted, path, batches = selecting
    changed = _shift(converted, path, 0.7)
    report = qtrace.verify(changed, converted, batches, min_equal=0.5, min_sqnr_db=10)
    assert report.worst_lsb() == 1
    text = report.summary()
    if "nms" in next(iter(report.selections.values())):
        # MegEngine's NMS orders ties otherwise: even the same integers give other rows.
        assert not report.passed
        assert "site getitem_out_3" in "".join(report.unequal["op_by_op"])
        assert "decide values next to a threshold, or ties, otherwise" in text
        assert report.cross_check is None
        assert "no fault" not in text
        return
    assert "op_by_op" not in report.unequal
    assert report.passed, report.table()
    assert "its rows depend on values" in text
    assert f"test_selections.py:{_line(converted)}" in text
    assert "from end to end integers differ, first scores_out_q by 1 LSB" in text
    assert "this is no fault of the file" in text
    assert "export it again" not in text
    (what, shapes), *_ = report.unequal["end_to_end"].items()
    assert what.startswith("site ")
    assert all(mine[0] != theirs[0] and mine[1:] == theirs[1:] for mine, theirs in shapes)
    # The outputs are compared all the same: the graph computes them for the rows that the runtime selects.
    assert "reference" not in report.unequal
    assert report.sqnr_db("reference") > 10
    assert json.loads(json.dumps(report.to_dict()))["unequal_rows"]
    # From the same integers, all of it is equal: there is nothing to bisect.
    assert qtrace.bisect(changed, converted, batches, min_equal=0.5, min_sqnr_db=10) is None


def _line(converted: TracedModule) -> int:
    """The line of the op that selects rows."""
    origin = next(iter(find_selections(converted).values()))
    return int(origin.rpartition(":")[2].rstrip(")"))


def test_verify_fails_on_another_selection_from_equal_integers(
    selecting: tuple[TracedModule, TracedModule, Path, list[np.ndarray]],
) -> None:
    _, converted, path, batches = selecting
    model = onnx.load(path)
    node = next(n for n in model.graph.node if n.op_type in ("Greater", "NonMaxSuppression"))
    name = node.input[1 if node.op_type == "Greater" else 3]
    tensor = next((t for t in model.graph.initializer if t.name == name), None)
    assert tensor is not None
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.2), name))
    changed = path.with_name("threshold.onnx")
    onnx.save(model, changed)
    report = qtrace.verify(changed, converted, batches, min_sqnr_db=10)
    assert not report.passed
    text = report.summary()
    assert "from the same integers: it cannot be compared" in text
    assert "no op that was compared differs by more than 1 LSB" in text
    assert "verified alone (qtrace.prepare with outputs=)" in text
    assert "no fault" not in text
    assert "export it again" not in text
    found = qtrace.bisect(changed, converted, batches)
    assert found is not None
    assert found.rows.startswith("site ")
    assert "its rows depend on values" in found.table()
    assert found.op == next(iter(find_selections(converted).values()))


def test_verify_finds_a_fault_before_the_selection(
    selecting: tuple[TracedModule, TracedModule, Path, list[np.ndarray]],
) -> None:
    _, converted, path, batches = selecting
    changed = _shift(converted, path, 20.0)
    report = qtrace.verify(changed, converted, batches)
    assert report.worst_lsb() > 1
    assert "no fault of the file" not in report.summary()
    found = qtrace.bisect(changed, converted, batches)
    assert found is not None
    assert found.site == "scores_out_q"


@pytest.mark.parametrize(
    "selecting", ["cond_take", pytest.param("nms", marks=pytest.mark.slow)], indirect=True, scope="module"
)
def test_compare_measures_the_rows_that_are_selected(
    selecting: tuple[TracedModule, TracedModule, Path, list[np.ndarray]],
) -> None:
    traced, converted, _, batches = selecting
    comparison = qtrace.compare(converted, batches, float_model=traced)
    rows = comparison.outputs[1]
    # Both sides compute the rows that the quantized graph selects; what float selects otherwise is a share.
    assert rows.unequal == 0
    assert rows.sqnr_db > 20
    assert rows.selected is not None
    assert 0.5 < rows.selected < 1
    head = next(site for site in comparison.sites if site.site.startswith("head"))
    assert not head.unequal
    assert math.isfinite(head.sqnr_db)
    assert math.isfinite(head.own_db)
    assert f"{rows.selected:.2%} of the rows are selected in float, too" in comparison.table()
    assert "<svg" in comparison.html()


def test_agreement_of_rows_that_values_choose_is_of_the_rows_of_both() -> None:
    mge.random.seed(5)
    parts = {"scores": M.Conv2d(4, 4, 3, padding=1)}

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        scores = F.reshape(self.scores(x), (-1, 4))
        return scores[F.cond_take(scores[:, 0] > 0.0, scores[:, 0])[1]]

    batches = [images(2, 4, 8, 8, seed=s) for s in range(2)]
    prepared = qtrace.prepare(qtrace.trace(net(forward, **parts), batches[0], check=False))
    qtrace.calibrate(prepared, batches, progress=False)
    table = analyze(prepared, batches, metric="agreement").table()
    assert re.search(r"agreement with everything quantized: (9\d|100)", table)


def test_shapes_that_do_not_depend_on_values_are_refused_still(
    selecting: tuple[TracedModule, TracedModule, Path, list[np.ndarray]],
) -> None:
    _, converted, path, batches = selecting
    model = onnx.load(path)
    name = model.graph.output[0].name
    node = next(n for n in model.graph.node if name in n.output)
    node.output[0] = "planted"
    model.graph.node.append(onnx.helper.make_node("Concat", ["planted"] * 2, [name], axis=1))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value *= 2
    changed = path.with_name("wide.onnx")
    onnx.save(model, changed)
    with pytest.raises(ExportError, match="export it again"):
        qtrace.verify(changed, converted, batches)


def test_an_optimization_that_is_wrong_before_the_selection_fails() -> None:
    report = VerifyReport("m.onnx", 1, 0.999, 35.0, selections={"kept": "nms_out (F.nms)"})
    zeros = np.zeros(10, np.int64)
    for mode, step in (("op_by_op", 0), ("end_to_end", 1), ("deployed", 1)):
        report.add(mode, "a_q", zeros, zeros + step)
        report.add_outputs(mode, ["kept"], [np.ones((4, 2))], [np.ones((4 + step, 2))])
    assert report.passed, report.summary()
    report.add("deployed", "a_q", zeros, zeros + 9)
    assert not report.passed
    assert "sites (deployed) differ by 9 LSB, by 1 LSB without optimizations" in report.summary()
    assert "only the optimized form falls short" in report.summary()


def test_equal_scores_come_in_any_order_of_different_places() -> None:
    ranked = Ranked(np.ones((2, 3), np.float32), np.ones((2, 2), np.float32))
    assert ranked.accepts(np.array([[0, 1], [1, 0]]))
    assert not ranked.accepts(np.array([[0, 2], [1, 1]]))
    assert not ranked.accepts(np.array([[0, 1], [1, 3]]))
