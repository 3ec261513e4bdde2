"""An input half a step from two integers is as near to either: the graph takes the runtime's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.graph.types import TracedModule
from qtrace.targets.onnxruntime import runtime as onnxruntime
from qtrace.verification.runtimes.base import RuntimeRun
from tests.nets import images, net, randomize

# Clipped as photographs are: 1.5 is 127.5 steps of the range from -1.5 to 1.5.
X = np.clip(images(2, 3, 16, 16) * 3, -1.5, 1.5)


@pytest.fixture(scope="module")
def converted() -> TracedModule:
    parts = {"conv": M.Conv2d(3, 8, 3), "last": M.Conv2d(8, 4, 3)}
    module = randomize(net(lambda self, x: self.last(F.relu(self.conv(x))), **parts))
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), {"placement": "everything"})
    return qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))


class _RoundsInputs(onnxruntime.OnnxSession):
    """Stands for a runtime that rounds the upper end of an input by so many steps less."""

    less = 0.5

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        lowered = [np.where(x >= 1.5, np.float32(1.5 - self.less * 3 / 255), x) for x in inputs]
        run = super().run(lowered)
        name = next(name for name in run.integers if name.startswith("x"))
        assert np.ptp(run.integers[name])
        return run


class _RoundsWrong(_RoundsInputs):
    """As before, by more than a tie explains."""

    less = 2.0


@pytest.mark.parametrize(("session", "ties"), [(_RoundsInputs, True), (_RoundsWrong, False)])
def test_a_tie_of_an_input_is_no_difference_behind_it(
    session: type, ties: bool, converted: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "RUNTIME", dataclasses.replace(onnxruntime.RUNTIME, open=session))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, [X])
    for mode in ("end_to_end", "deployed"):
        worst = {name: tally.worst for name, tally in report.sites[mode].items()}
        assert (max(worst.values()) <= 1) is ties, worst
        assert (report.equal_share(mode) > 0.99) is ties
