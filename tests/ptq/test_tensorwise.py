"""The planner for one scale a tensor: it tells what is lost, helps where it can, and harms nobody."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from qtrace import QConfig
from qtrace.preparation.model import read_record
from tests.nets import images, left_lines, net


def _module(activation: Any) -> M.Module:
    module = net(
        lambda self, x: self.b(activation(self.a(x))), a=M.Conv2d(4, 8, 3, groups=2), b=M.Conv2d(8, 5, 1)
    )
    value = module.a.weight.numpy() * np.exp2(-np.arange(8.0)).reshape(2, 4, 1, 1, 1)
    module.a.weight._reset(mge.Parameter(value.astype(np.float32)))
    return module


def _report(module: M.Module, axis: int | None, *ptq: Any) -> tuple[dict[str, Any], float]:
    x = images(2, 4, 9, 9)
    expected = module(mge.Tensor(x)).numpy()
    traced = qtrace.trace(module, x, check=False)
    prepared = qtrace.prepare(traced, QConfig(weight={"axis": axis}, ptq=ptq))
    error = np.abs(prepared(mge.Tensor(x)).numpy() - expected).max() / np.abs(expected).max()
    return read_record(prepared).ptq[-1], float(error)


def test_a_planted_imbalance_is_reported_and_mended() -> None:
    report, error = _report(_module(F.relu), None, "tensorwise")
    assert error <= 1e-5
    (line,) = [c for c in report["changed"] if c.startswith("a_out")]
    now, before = (float(part.split()[0]) for part in (line.split("loses ")[1], line.split("mean, ")[1]))
    assert before > 3.0  # halved from channel to channel: 3.5 bits in the mean
    assert now < 0.6 * before
    noise = [[10 ** (-e[key] / 10) for e in report["errors"]] for key in ("before", "after")]
    assert sum(noise[1]) < sum(noise[0])


def test_what_cannot_be_equalized_is_reported_with_its_loss() -> None:
    report, error = _report(_module(F.sigmoid), None, "tensorwise")
    assert error <= 1e-6
    assert report["changed"] == []
    assert len(left_lines(report)) == 1
    assert "a_out: sigmoid (sigmoid_out) does not scale with its input; 3." in left_lines(report)[0]


def test_a_scale_for_each_channel_needs_no_plan() -> None:
    report, _ = _report(_module(F.relu), 0, "tensorwise")
    assert left_lines(report) == ["no layer has a weight with one scale for all channels"]


def test_balanced_layers_are_left_alone() -> None:
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(4, 8, 3), b=M.Conv2d(8, 5, 1))
    report, error = _report(module, None, {"tensorwise": {"bits": 2.0}})
    assert (report["changed"], left_lines(report), error) == ([], [], 0.0)
