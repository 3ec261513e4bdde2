"""An output that is one number in all samples, beside others that are not: the verdict names it."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.comparing.groups import find_groups
from qtrace.sensitivity.diagnosis import JudgedOutputs, diagnose, judge_outputs
from tests.nets import images, net, randomize

X = images(8, 3, 12, 12, seed=1)


def _judged(*outputs: np.ndarray, names=(), one_number: bool = False):
    reference = [[value[:4] for value in outputs], [value[4:] for value in outputs]]
    noisy = [
        [v + np.float32(1e-3) if v.dtype.kind == "f" and v.size and np.ptp(v) else v for v in b]
        for b in reference
    ]
    groups = find_groups(None, reference, names=names)
    repeated = [[False] * 4, [False] * 4]
    compared = JudgedOutputs(groups, reference, noisy, [4, 4], repeated, one_number)
    return judge_outputs(compared, "samples")


LIVE = X.mean((2, 3))


@pytest.mark.parametrize(
    ("silent", "number"),
    [
        (np.zeros((8, 2), np.float32), "0"),
        (np.full((8, 2), 0.25, np.float32), "0.25"),
        (np.full((8,), 3, np.int32), "3"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_an_output_that_is_one_number_is_named(silent: np.ndarray, number: str, place: int) -> None:
    values = [LIVE, LIVE * 2]
    values[place] = silent
    verdict = _judged(*values)
    assert verdict.word == "good"
    (doubt,) = verdict.doubts
    assert doubt.text.startswith(f"Output {place} is {number} in all samples, which show nothing of it: give")
    assert "Output scores is" in str(_judged(*values, names=("scores", "scores")))


@pytest.mark.parametrize(
    "values",
    [
        (LIVE, LIVE),
        (LIVE, np.broadcast_to(np.float32([1, 2]), (8, 2))),  # anchors
        (LIVE, np.ones((8, 2), bool)),  # a mask
        (LIVE, np.concatenate([np.zeros((7, 2), np.float32), np.ones((1, 2), np.float32)])),
        (LIVE, np.full((8, 2), np.nan, np.float32)),
        (LIVE, np.zeros((8, 0), np.float32)),
        (np.zeros((8, 2), np.float32), np.ones((8, 2), np.float32)),  # said of all outputs
    ],
)
def test_other_outputs_are_not(values: tuple[np.ndarray, ...]) -> None:
    assert not _judged(*values).has("silent-output")


def test_inputs_of_one_number_are_said_alone() -> None:
    assert _judged(LIVE, np.zeros((8, 2), np.float32), one_number=True).has("silent-output") is False


def test_a_network_with_a_dead_branch() -> None:
    def forward(self, x):
        y = F.relu(self.a(x))
        return self.b(y), F.relu(self.c(y) - 1e4)

    layers = {"a": M.Conv2d(3, 8, 3), "b": M.Conv2d(8, 4, 1), "c": M.Conv2d(8, 4, 1)}
    prepared = qtrace.prepare(qtrace.trace(randomize(net(forward, **layers), 0), X[:2]))
    qtrace.calibrate(prepared, [X[:4]])
    verdict = diagnose(prepared, [X[4:]]).verdict
    assert "Output relu_out_1 is 0 in all samples, which show nothing of it" in str(verdict)
