"""Outputs of integers, such as indices, have a say in the verdict."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.comparing.groups import find_groups
from qtrace.comparing.sums import integer_errors
from qtrace.sensitivity.diagnosis import JudgedOutputs, diagnose, judge_outputs
from tests.nets import images, net

_X = images(8, 3, 8, 8)
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


@pytest.mark.quick(2)
@pytest.mark.parametrize("end", LOST.values(), ids=LOST)
def test_lost_integers_are_not_good(end):
    verdict = _verdict(end)
    assert verdict.word in ("check", "broken")
    # Places that a selection gives are judged by their scores, other integers by their values.
    if verdict.rows is None:
        assert verdict.agreement < 0.9
        assert f"{verdict.agreement:.1%} equal predictions" in verdict.line()
    else:
        assert verdict.rows < 0.9
        assert f"{verdict.rows:.1%} of the rows selected as in float" in verdict.line()
    assert "exact" not in verdict.line()


KEPT = {
    "argmax": lambda y: F.argmax(y * 4, axis=1),
    "bytes": lambda y: F.clip(y * 40 + 128, 0, 255).astype("uint8"),
}


@pytest.mark.parametrize("end", KEPT.values(), ids=KEPT)
def test_right_and_close_integers_are_good(end):
    assert _verdict(end).word == "good"


@pytest.mark.parametrize(
    ("wrong", "word"), [(0, "good"), (4, "good"), (12, "check"), (48, "broken"), (80, "broken")]
)
def test_the_word_for_a_share_of_equal_integers(wrong, word):
    indices = np.random.default_rng(0).integers(0, 50, (8, 10))
    others = np.where(np.arange(80).reshape(8, 10) < wrong, (indices + 25) % 50, indices)
    assert _judged(indices, others).word == word


def test_batches_of_other_rows_are_left_out():
    reference = [[np.arange(4), np.zeros(2, np.float32)], [np.arange(3), np.zeros(2, np.float32)]]
    test = [[np.arange(4)[::-1], np.zeros(2, np.float32)], [np.arange(2), np.zeros(2, np.float32)]]
    ((index, equal, _),) = [(e.output, e.equal, e.sqnr_db) for e in integer_errors(reference, test)]
    assert (index, equal) == (0, 0.0)


def _judged(reference, outputs):
    groups = find_groups(None, [[reference]], names=("y",))
    compared = JudgedOutputs(groups, [[reference]], [[outputs]], [len(reference)], [()])
    return judge_outputs(compared, "samples")


_COUNTS = np.arange(48).reshape(8, 6) * 7 % 31 + 100


def test_numbers_that_are_close_have_a_figure_and_are_not_exact():
    verdict = _judged(_COUNTS, _COUNTS + (_COUNTS % 2))
    assert verdict.word == "good"
    assert "exact" not in verdict.line()
    assert verdict.line().startswith("verdict   good: 4")
    nearly = _COUNTS + (_COUNTS == 100)
    assert "95.8% equal predictions" in _judged(_COUNTS, nearly).line()
    assert _judged(_COUNTS, _COUNTS).line().startswith("verdict   good: outputs are exact")


def test_a_mask_of_which_nearly_all_is_right_is_not_exact():
    mask = np.arange(80000).reshape(8, 10000) % 5 < 2
    line = _judged(mask, mask ^ (np.arange(10000) == 7)).line()
    assert "99.9% equal predictions" in line
    assert "exact" not in line


def test_numbers_far_from_0_are_not_good_if_they_tell_nothing_of_the_samples():
    verdict = _judged(_COUNTS + 1000, np.full_like(_COUNTS, 1115))
    assert verdict.word == "broken"
    assert "no information is left" in verdict.line()


@pytest.mark.parametrize("kept", [0, 16])
def test_rare_hits_of_a_mask_are_not_good_if_they_are_lost(kept):
    hits = np.zeros((8, 200), bool)
    hits[np.arange(16) % 8, np.arange(16) * 11] = True
    mask = hits & (np.cumsum(hits.ravel()).reshape(hits.shape) <= kept)
    mask[0, 5] = True  # is no hit
    verdict = _judged(hits, mask)
    assert verdict.agreement > 0.98
    assert verdict.word == ("good" if kept else "check")
    assert verdict.has("differences") is not bool(kept)
