"""``qtrace finetune``: a folder, whole or not at all, and a run that goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import cli
from qtrace.extras.finetune.training import Trainer
from qtrace.preparation.model import graph_hash
from qtrace.quantizing.reporting import FILES
from tests.nets import net


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a prepared graph and data."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(24, 3, 4, 4)).astype(np.float32)
    np.savez("data.npz", images=images)
    module = net(
        lambda self, x: self.fc(F.mean(F.relu(self.a(x)), (2, 3))), a=M.Conv2d(3, 4, 1), fc=M.Linear(4, 3)
    )
    config = {"backend": "generic", "fakequant": "lsq", "weight": {"bits": 3}}
    prepared = qtrace.prepare(qtrace.trace(module, images[:1], check=False), config)
    qtrace.calibrate(prepared, [images], progress=False)
    qtrace.save(prepared, "prepared.mge")
    return tmp_path


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["finetune", "prepared.mge", "--data", "data.npz", "--out", "out", *arguments])
    return int(ended.value.code or 0)


def test_interrupted_run_leaves_its_state_and_goes_on_to_a_whole_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer.compute

    def stops(self: Trainer, number: int) -> Any:
        if number == 2:
            raise KeyboardInterrupt
        return step(self, number)

    given = ("--steps", "4", "--batch-size", "8", "--checkpoint-steps", "1", "--lr", "0.1", "--json")
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "compute", stops)
        assert _run(*given) == 130
    assert {p.name for p in (here / "out").iterdir()} == {".calibration"}
    assert "go on with --resume" in capsys.readouterr().err
    assert _run(*given) == 2
    assert "checkpoints of a run that did not end" in capsys.readouterr().err
    assert _run(*given, "--resume") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["finetuning"]["resumed"] == 2
    assert len(told["finetuning"]["loss"]) == 4
    assert {p.name for p in (here / "out").iterdir()} == set(FILES)
    report = json.loads((here / "out" / "report.json").read_text())
    assert report["finetuning"] == told["finetuning"]
    assert report["sites"]
    tuned = qtrace.load(here / "out" / "quantized.mge")
    old = qtrace.load(here / "prepared.mge")
    assert not np.array_equal(tuned.a.weight.numpy(), old.a.weight.numpy())


def test_wrong_model_or_setting_is_a_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--lr", "-1") == 2
    assert "finetune: lr is -1.0" in capsys.readouterr().err
    assert not (here / "out").exists()


def test_a_run_without_gain_writes_the_model_as_it_was_and_says_so(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--steps", "6", "--batch-size", "8", "--lr", "1e-12", "--minutes", "5")
    assert _run(*given) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("NO STEP WAS BETTER than the start: the model is as it was.")
    assert re.search(r"finetune: about \d+ s: 6 steps of", printed.err)
    assert "finetune: no step was better than the start" in printed.err
    report = json.loads((here / "out" / "report.json").read_text())["finetuning"]
    assert report["best_step"] == 0
    assert report["error_after"] == report["error_before"]
    assert graph_hash(qtrace.load(here / "out" / "prepared.mge")) == graph_hash(
        qtrace.load(here / "prepared.mge")
    )


def test_quiet_shows_warnings_but_no_estimate(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--steps", "6", "--batch-size", "8", "--lr", "1e-12", "-q") == 0
    printed = capsys.readouterr().err
    assert printed == "warning: finetune: no step was better than the start: the model is as it was\n"
    assert _run("--minutes", "-1", "--force") == 2
    assert "finetune: max_minutes is -1.0: give a number above 0" in capsys.readouterr().err
