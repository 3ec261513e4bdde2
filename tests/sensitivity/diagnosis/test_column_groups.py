"""Outputs that pack unlike quantities: the worst columns decide the verdict."""

import json
import math

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.comparing.runs import outputs_of
from qtrace.comparing.sums import sqnr_db
from qtrace.sensitivity.diagnosis import diagnose
from qtrace.sensitivity.diagnosis.verdict import judge
from qtrace.sensitivity.metrics import sqnr

_X = np.random.RandomState(0).randn(8, 3, 8, 8).astype("float32")
_FACTORS = np.repeat([64.0, 0.02], [4, 6]).astype("float32")
# What would stay in float, as its columns have unlike ranges, is rounded all the same.
_ROUNDED = [{"match": {"op": ["conv2d", "concat"]}, "quantize": True, "optional": True}]
_RISING = np.arange(10, dtype="float32")


class Detector(M.Module):
    """Two convolutions, behind which an end makes boxes and scores."""

    def __init__(self, end, factors=None):
        super().__init__()
        mge.random.seed(0)
        self.a, self.b, self.end = M.Conv2d(3, 8, 3, padding=1), M.Conv2d(8, 10, 3, padding=1), end
        if factors is not None:
            self.b.weight *= factors.reshape(-1, 1, 1, 1)
            self.b.bias *= factors.reshape(1, -1, 1, 1)

    def forward(self, x):
        return self.end(self.b(F.relu(self.a(x))))


def _diagnose(end, backend, factors=None, batch=_X, **options):
    net = Detector(end, factors)
    net.eval()
    traced = qtrace.trace(net, mge.tensor(batch), check=False)
    rules = [] if factors is None else _ROUNDED
    prepared = qtrace.prepare(traced, {"backend": backend, "rules": rules})
    qtrace.calibrate(prepared, [batch], progress=False)
    return diagnose(prepared, [batch], progress=False, **options), traced, prepared


ONE_GRID = {
    "channels": (lambda y: y, 1, [(0, 4)], [(4, 10)]),
    "last axis": (lambda y: y.transpose(0, 2, 3, 1), 3, [(0, 4)], [(4, 10)]),
    "anchors x columns": (lambda y: F.flatten(y, 2).transpose(0, 2, 1), 2, [(0, 4)], [(4, 10)]),
    "rows": (lambda y: y.transpose(0, 2, 3, 1).reshape(-1, 10), 1, [(0, 4)], [(4, 10)]),
    "in the middle": (lambda y: F.concat([y[:, :2], y[:, 4:], y[:, 2:4]], 1), 1, [(0, 2), (8, 10)], [(2, 8)]),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ONE_GRID)
def test_columns_that_one_grid_loses_are_broken_and_named(name):
    end, axis, large, small = ONE_GRID[name]
    diagnosis, _, _ = _diagnose(end, "tflite", _FACTORS)
    verdict = diagnosis.verdict
    assert verdict.word == "broken"
    assert {g.columns: (g.axis, g.informative) for g in verdict.groups} == {
        tuple(large): (axis, True),
        tuple(small): (axis, False),
    }
    assert verdict.worst.columns == tuple(small)
    assert verdict.sqnr_db == verdict.worst.sqnr_db < 3
    assert f" in the worst output group ({verdict.worst.name})" in verdict.line()
    assert "no information is left" in verdict.line()


@pytest.mark.parametrize("batch", [_X, _X[:1]])
def test_of_several_outputs_the_worst_is_named(batch):
    ends = {"boxes": lambda y: y[:, :4], "all": lambda y: y}
    diagnosis, _, _ = _diagnose(
        lambda y: {name: end(y) for name, end in ends.items()}, "tflite", _FACTORS, batch
    )
    verdict = diagnosis.verdict
    assert verdict.word == "broken"
    assert (verdict.worst.output, verdict.worst.columns) == (1, ((4, 10),))
    assert [group.output for group in verdict.groups] == [0, 1, 1]


@pytest.mark.quick(2)
@pytest.mark.parametrize("backend", ["onnxruntime", "tflite", "qnn", "openvino", "tensorrt", "ncnn"])
def test_diagnosis_never_calls_lost_scores_good(backend):
    def end(y):
        return F.concat([F.exp(y[:, :4]) * 64, F.sigmoid(y[:, 4:] - 3)], axis=1)

    diagnosis, traced, prepared = _diagnose(end, backend)
    qtrace.set_phase(prepared, "quantize")
    (exact,), (rounded,) = outputs_of(traced, [_X])[0], outputs_of(prepared, [_X])[0]
    lost = sqnr_db(exact[:, 4:], rounded[:, 4:]) < 10
    assert (diagnosis.verdict.word == "broken") == lost
    if lost:
        assert "columns 4..9" in diagnosis.verdict.line()
        assert "unlike-branches" in [cause.name for cause in diagnosis.causes]
        assert "quantize: false" in diagnosis.recipe()


def test_a_good_metric_does_not_hide_lost_columns():
    diagnosis, _, _ = _diagnose(lambda y: y, "tflite", _FACTORS, metric=lambda model: 1.0)
    assert diagnosis.verdict.word == "broken"
    assert judge(50.0, 1.0, 1.0) == "good"
    assert judge(50.0, 1.0, 1.0, informative=False) == "broken"


def test_a_limit_counts_for_the_worst_columns():
    diagnosis, _, _ = _diagnose(lambda y: y, "tflite", _FACTORS, at_least=20.0)
    assert not diagnosis.verdict.passed


PLAIN = {
    "logits": lambda y: y.mean(axis=(2, 3)),
    "softmax": lambda y: F.softmax(y.mean(axis=(2, 3)) * 4, axis=1),
    "rare classes": lambda y: F.sigmoid(
        y * 2 - mge.tensor(np.arange(10, dtype="float32")).reshape(1, 10, 1, 1)
    ),
    "features": F.relu,
    "a constant beside": lambda y: F.concat([y, F.zeros_like(y[:, :1]) + 4.0], axis=1),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", PLAIN)
def test_no_false_alarm(name):
    diagnosis, _, _ = _diagnose(PLAIN[name], "tflite")
    assert diagnosis.verdict.word == "good", diagnosis.lines()
    assert "group" not in diagnosis.verdict.line()


def test_json_has_every_group():
    diagnosis, _, _ = _diagnose(lambda y: y, "tflite", _FACTORS)
    groups = json.loads(json.dumps(diagnosis.to_dict()))["verdict"]["groups"]
    assert [(g["columns"], g["informative"]) for g in groups] == [([[0, 4]], True), ([[4, 10]], False)]


def test_the_metric_is_that_of_the_worst_columns():
    values = np.random.RandomState(0).rand(4, 30, 85) * np.repeat([640.0, 0.4], [4, 81])
    rounded = np.rint(values / 2.5) * 2.5
    assert sqnr_db(values, rounded) > 40
    assert sqnr([[values]], [[rounded]]) == 0.0
    assert sqnr([[values], [values]], [[rounded], [values]]) == pytest.approx(3.0, abs=0.1)


def _selected(y):
    values = F.flatten(y)
    return F.cond_take(values > 0.0, values)[0]


SELECTIONS = {"alone": _selected, "beside another": lambda y: (y, _selected(y))}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selected_rows_are_compared_with_the_same_rows(name):
    end = SELECTIONS[name]
    verdict = _diagnose(end, "tflite")[0].verdict
    assert not verdict.has("uncompared")
    assert math.isfinite(verdict.sqnr_db)
    assert 0.9 < verdict.rows < 1.0
    assert f"{verdict.rows:.1%} of the rows selected as in float" in verdict.line()
    assert _diagnose(end, "tflite", metric=lambda model: 1.0)[0].verdict.word == "good"
