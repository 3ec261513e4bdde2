"""Outputs of integers, such as indices, have a say in the verdict."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.sensitivity.diagnosis import diagnose
from qtrace.sensitivity.diagnosis.verdict import judge
from qtrace.sensitivity.metrics import integer_errors
from tests.nets import images, net

_X = images(4, 3, 8, 8)
# On a grid that reaches up to 100, the scores are equal, and the first index is the largest everywhere.
LOST = {
    "argmax": lambda y: F.argmax(F.sigmoid(y) + 100, axis=1),
    "top-k": lambda y: F.topk(F.mean(F.sigmoid(y), axis=(2, 3)) + 100, 2, descending=True)[1],
    "comparison": lambda y: (F.sigmoid(y) + 100 > 100.5).astype("int32"),
    "beside floats": lambda y: (y, F.argmax(F.sigmoid(y) + 100, axis=1)),
}


def _verdict(end):
    traced = qtrace.trace(net(lambda self, x: end(self.a(x)), a=M.Conv2d(3, 6, 3)), _X, check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, "backend/tflite"), [_X], progress=False)
    return diagnose(prepared, [_X], twin=None, progress=False).verdict


@pytest.mark.parametrize("end", LOST.values(), ids=LOST)
def test_lost_integers_are_not_good(end):
    verdict = _verdict(end)
    assert verdict.word in ("check", "broken")
    # Places that a selection gives are judged by their scores, other integers by their values.
    if verdict.rows is None:
        assert verdict.equal < 0.9
        assert f"equal integers {verdict.equal:.1%}" in verdict.line()
    else:
        assert verdict.rows < 0.9
        assert f"{verdict.rows:.1%} of the selected rows are float's" in verdict.line()
    assert "exact" not in verdict.line()


KEPT = {
    "argmax": lambda y: F.argmax(y * 4, axis=1),
    "bytes": lambda y: F.clip(y * 40 + 128, 0, 255).astype("uint8"),
}


@pytest.mark.parametrize("end", KEPT.values(), ids=KEPT)
def test_right_and_close_integers_are_good(end):
    assert _verdict(end).word == "good"


@pytest.mark.parametrize(
    ("equal", "word"), [(None, "good"), (1.0, "good"), (0.89, "check"), (0.49, "broken"), (0.0, "broken")]
)
def test_the_word_for_a_share_of_equal_integers(equal, word):
    assert judge(40.0, equal=equal) == word


def test_batches_of_other_rows_are_left_out():
    reference = [[np.arange(4), np.zeros(2, np.float32)], [np.arange(3), np.zeros(2, np.float32)]]
    test = [[np.arange(4)[::-1], np.zeros(2, np.float32)], [np.arange(2), np.zeros(2, np.float32)]]
    ((index, equal, _),) = [(e.output, e.equal, e.sqnr_db) for e in integer_errors(reference, test)]
    assert (index, equal) == (0, 0.0)
