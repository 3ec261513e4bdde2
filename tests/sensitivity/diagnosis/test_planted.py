"""Planted faults: the cause comes first, and the command that `calibrate` prints cures it."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.cli.program import group
from qtrace.errors import ConfigError, DataError
from qtrace.sensitivity.diagnosis import diagnose
from qtrace.sensitivity.diagnosis.inputs import compare_inputs, measure_inputs
from tests.nets import images, net
from tests.sensitivity.diagnosis import planted

RECIPE = "schema: qtrace/1\nimports: [backend/onnxruntime]\n"


def run(command: str) -> tuple[int, str, str]:
    """Runs a command line in this process; returns the exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = group.main(shlex.split(command)[1:], standalone_mode=False)
    return code or 0, out.getvalue(), err.getvalue()


def calibrate(command: str) -> dict[str, Any]:
    """Runs `qtrace calibrate` and returns its JSON; a broken verdict ends with 1."""
    code, out, err = run(f"{command} --json --force")
    document: dict[str, Any] = json.loads(out)
    assert code == (document["verdict"]["word"] == "broken"), err
    return document


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the current one, with the data."""
    monkeypatch.chdir(tmp_path)
    for name, array in planted.arrays().items():
        np.save(f"{name}.npy", array)
    return tmp_path


def plant(sort: str, fault: str) -> str:
    """Writes a network with a fault and its recipe; returns the command that calibrates it."""
    change, lines = planted.FAULTS[fault]
    net = planted.build(sort)
    change(net)
    qtrace.save(qtrace.trace(net, planted.images(2), check=False), "net.mge")
    Path("mine.yaml").write_text(RECIPE + lines)
    data = "calibration.npy"
    if fault == "too-few-samples":
        data = "pale-first.npy --batch-size 2 --max-batches 1 --evaluation evaluation.npy"
    return f"qtrace calibrate net.mge --data {data} --recipe mine.yaml --out int8"


def is_cured(sort: str, fault: str, reference: float) -> tuple[bool, bool]:
    """Whether the cause is named first, and whether the next command regains 90 % of the loss."""
    before = calibrate(plant(sort, fault))
    named = before["causes"][0]["name"] == fault
    if not before["next"].startswith("qtrace calibrate"):
        return named, False
    after = calibrate(before["next"])["verdict"]["sqnr_db"]
    lost = reference - before["verdict"]["sqnr_db"]
    assert lost > 10, (sort, fault)  # the fault does harm
    return named, after - before["verdict"]["sqnr_db"] >= 0.9 * lost


@pytest.mark.slow
def test_causes_are_named_and_cured(folder):
    named, cured = {}, {}
    for sort in planted.NETS:
        qtrace.save(qtrace.trace(planted.build(sort), planted.images(2), check=False), "sound.mge")
        command = "qtrace calibrate sound.mge --data calibration.npy --recipe backend/onnxruntime --out sound"
        sound = calibrate(command)
        assert sound["verdict"]["word"] == "good"
        assert sound["next"] == "qtrace export sound/quantized.mge -o sound-int8.onnx"
        for fault in planted.FAULTS:
            named[sort, fault], cured[sort, fault] = is_cured(sort, fault, sound["verdict"]["sqnr_db"])
    assert len(named) == 18
    assert sum(named.values()) >= 17, named
    assert sum(cured.values()) >= 16, cured


@pytest.mark.slow
def test_faults_of_the_data_are_named(folder):
    named = {}
    for sort in planted.NETS:
        qtrace.save(qtrace.trace(planted.build(sort), planted.images(2), check=False), "net.mge")
        for data, cause in (("bgr", "channel-order"), ("pixels", "normalization"), ("unit", "normalization")):
            report = calibrate(
                f"qtrace calibrate net.mge --data {data}.npy --recipe backend/onnxruntime --out int8 "
                "--evaluation evaluation.npy"
            )
            assert report["verdict"]["word"] in ("check", "broken")
            assert "--data evaluation.npy" in report["next"]
            named[sort, data] = report["causes"][0]["name"] == cause
    assert sum(named.values()) >= len(named) - 1, named


def test_an_outlier_channel_is_named_and_cured(folder):
    named, cured = is_cured("plain", "outlier-channels", 36.0)
    assert (named, cured) == (True, True)
    text = Path("int8/cure.yaml").read_text()
    assert "imports: [../mine.yaml]" in text
    assert "ptq: [fuse_bn, equalize]" in text
    assert "channel 3 of 16" in text  # the reason stands above the line


def test_compare_begins_with_the_verdict(folder):
    calibrate(plant("plain", "outlier-channels"))
    _, out, _ = run("qtrace compare int8/quantized.mge --data evaluation.npy --float net.mge --max-batches 1")
    lines = out.splitlines()
    assert lines[0].startswith(("verdict   check", "verdict   broken"))
    assert lines[1].startswith("  outlier-channels at relu_out_2 ")
    assert "    ptq: [fuse_bn, equalize]" in lines
    _, out, _ = run("qtrace compare int8/prepared.mge --data evaluation.npy --max-batches 1 --json")
    diagnosis = json.loads(out)["diagnosis"]
    site = next(s for s in diagnosis["sites"] if s["site"] == "relu_out_2")
    assert np.argmax(site["channels"]["high"]) == 3  # the figures of each channel, for plots
    assert diagnosis["causes"][0]["channels"] == [3]


def test_at_least_decides_the_exit_code_and_the_verdict_shows_its_progress(folder):
    command = plant("plain", "outlier-channels")
    code, _, err = run(f"{command} --at-least 30 --progress")
    assert code == 1
    assert "not at least 30" in err
    assert "next: qtrace export" not in err
    assert "verdict: 100%" in err
    code, _, err = run(f"{command} --force --at-least 3 --quiet")
    assert code == 0
    assert "verdict: 100%" not in err


def test_a_metric_that_is_none_is_refused_before_the_calibration(folder):
    command = plant("plain", "outlier-channels")
    with pytest.raises(ConfigError, match="--metric nope is no function"):
        run(f"{command} --metric nope")
    with pytest.raises(DataError, match="module 'json' lacks 'nope'"):
        run(f"{command} --metric json:nope")
    assert not Path("out").exists()


def test_a_metric_decides_the_verdict(folder):
    Path("own.py").write_text(
        "calls = []\ndef metric(graph):\n    calls.append(graph)\n    return len(calls)\n"
    )
    command = plant("plain", "outlier-channels")
    verdict = calibrate(f"{command} --metric own:metric")["verdict"]
    assert (verdict["word"], verdict["metric"], verdict["float_metric"]) == ("broken", 1.0, 2.0)


def test_channels_in_another_order_and_other_numbers_are_told_from_the_same_data() -> None:
    seen, others = (np.arange(3)[:, None, None] + images(32, 3, 4, 4, seed=seed) for seed in range(2))
    changed = (others, others[:, [1, 2, 0]], 8 * others)
    ours, *theirs = (measure_inputs([(x,)]) for x in (seen, *changed))
    causes = [compare_inputs(ours, statistics) for statistics in theirs]
    assert [cause and cause.name for cause in causes] == [None, "channel-order", "normalization"]


@pytest.mark.slow
def test_the_default_recipe_is_measured_against_float_weights(folder):
    """`gptq` stores rounded weights: beside these, they would look exact."""
    plant("plain", "dead-channels")
    Path("mine.yaml").write_text("schema: qtrace/1\nimports: [int8]\nplacement: everything\n")
    data = "--data calibration.npy --evaluation evaluation.npy --max-batches 4"
    report = calibrate(f"qtrace calibrate net.mge {data} --recipe mine.yaml --out int8")
    command = "qtrace compare int8/prepared.mge --data evaluation.npy --max-batches 2 --json"
    _, out, _ = run(f"{command} --float net.mge")
    compared = json.loads(out)
    assert report["verdict"]["sqnr_db"] == pytest.approx(compared["outputs"][0]["sqnr_db"], abs=0.01)
    assert compared["diagnosis"]["verdict"]["sqnr_db"] == pytest.approx(
        report["verdict"]["sqnr_db"], abs=0.01
    )


@pytest.mark.slow
def test_batches_are_held_back_if_there_are_enough(folder):
    command = plant("plain", "clipped-range")
    report = calibrate(command)  # 16 batches
    assert (report["batches"], report["verdict"]["measured_on"]) == (14, "held-back samples")
    report = calibrate(f"{command} --max-batches 3")
    assert (report["batches"], report["verdict"]["measured_on"]) == (3, "samples after the limit of batches")
    np.save("few.npy", planted.images(16))
    report = calibrate(command.replace("calibration.npy", "few.npy"))
    # Of two batches a quarter of the samples.
    assert (report["batches"], report["verdict"]["measured_on"]) == (2, "held-back samples")


def test_a_weight_that_is_computed_from_the_input_is_no_obstacle() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = F.relu(self.conv(x))
        return F.conv2d(y, F.reshape(F.mean(y, axis=0), (1, 4, 8, 8)))

    batches = [images(2, 3, 8, 8, seed=seed) for seed in range(2)]
    traced = qtrace.trace(net(forward, conv=M.Conv2d(3, 4, 3, padding=1)), batches[0], check=False)
    prepared = qtrace.prepare(traced, {"placement": "everything"})
    prepared = qtrace.calibrate(prepared, batches, progress=False)
    assert diagnose(prepared, batches, progress=False).verdict.sqnr_db > 20
