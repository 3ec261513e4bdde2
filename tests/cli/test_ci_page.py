"""The CI job of docs/guides/ci.md runs as it stands."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
import yaml

import qtrace
from qtrace import cli
from qtrace.benchmarking import files
from tests.nets import images, net

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "ci.md"


def test_ci_page_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "peak_memory", lambda *_: None)
    recipe, job = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    Path("int8.yaml").write_text(recipe)
    steps = yaml.safe_load(job)["jobs"]["quantize"]["steps"]
    commands = [step["run"] for step in steps if step.get("run", "").startswith("qtrace ")]
    assert len(commands) == 6
    x = images(24, 3, 16, 16)
    network = net(lambda self, x: F.relu(self.conv(x)), conv=M.Conv2d(3, 8, 3, padding=1))
    qtrace.save(qtrace.trace(network, x[:1], check=False), "float.mge")
    np.save("train.npy", x[:16])
    np.save("unseen.npy", x[16:])
    for command in commands:
        if command.startswith("qtrace diff"):
            shutil.copytree("int8", "released")
        with pytest.raises(SystemExit) as caught:
            cli.main([*shlex.split(command)[1:], "--quiet"])
        captured = capsys.readouterr()
        assert caught.value.code == 0, f"{command}: {captured.err}"
    assert "are the same" in captured.out
