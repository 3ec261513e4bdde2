"""The stage of calibration in Python: the folder, the verdict, and messages in Python's words."""

from __future__ import annotations

import json
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.calibration.running import RunSettings
from qtrace.errors import CalibrationError, QtraceError
from qtrace.quantizing.reporting import FILES, VERDICT
from tests.nets import images, net


def test_a_folder_with_its_verdict_as_the_command_writes_it(tmp_path: Path) -> None:
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 4, 1))
    x = images(64, 3, 8, 8)
    traced = qtrace.trace(module, x[:2], check=False)
    out = tmp_path / "int8"
    done = qtrace.calibrate_to_folder(traced, x, out, recipe="onnxruntime")
    assert {file.name for file in out.iterdir()} == {*FILES, VERDICT}
    assert done.judgement.verdict.word == "good"
    assert done.judgement.verdict.measured_on == "held-back samples"
    assert json.loads((out / VERDICT).read_text())["verdict"]["word"] == "good"
    assert done.summary["batches"] == 7  # one of eight is held back
    assert len(repr(done).splitlines()) < 8
    with pytest.raises(QtraceError, match="or replace it with force=True"):
        qtrace.calibrate_to_folder(traced, x, out)
    with pytest.raises(CalibrationError, match="workers open the data by its name"):
        qtrace.calibrate_to_folder(traced, x, tmp_path / "other", settings=RunSettings(workers=2))
    assert [file.name for file in tmp_path.iterdir()] == ["int8"]
