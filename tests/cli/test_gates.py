"""The limits of a recipe's ``expect`` decide the exit codes of calibrate, export and bench."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import cli
from qtrace.benchmarking import files
from tests.nets import images, net

RECIPE = "schema: qtrace/1\nbackend: onnxruntime\nplacement: fastest\nobservers: {activation: minmax}\n"


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    x = images(16, 3, 16, 16)

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))))

    layers = {"first": M.Conv2d(3, 16, 3, padding=1), "second": M.Conv2d(16, 16, 3, padding=1)}
    qtrace.save(qtrace.trace(net(forward, **layers), x[:2]), "float.mge")
    np.save("x.npy", x)

    def run(*args: str, expect: str = "") -> SimpleNamespace:
        Path("r.yaml").write_text(RECIPE + (f"expect: {{{expect}}}\n" if expect else ""))
        with pytest.raises(SystemExit) as caught:
            cli.main(list(args))
        captured = capsys.readouterr()
        return SimpleNamespace(code=caught.value.code, out=captured.out, err=captured.err)

    return run


CALIBRATE = ("calibrate", "float.mge", "-d", "x.npy", "-r", "r.yaml", "--batch-size", "2", "--json")


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("expect", "failed"),
    [
        ("min_sqnr: 5, max_megabytes: 1, max_milliseconds: 100", []),
        ("min_sqnr: 99, max_megabytes: 1", ["min_sqnr"]),
        ("min_sqnr: 5, max_megabytes: 0.0001", ["max_megabytes"]),
        ("max_milliseconds: 0.000001", ["max_milliseconds"]),
    ],
)
def test_calibrate(call, expect: str, failed: list[str]) -> None:
    result = call(*CALIBRATE, "-o", "out", expect=expect)
    checks = json.loads(result.out)["expect"][0]["checks"]
    assert [check["name"] for check in checks if check["passed"] is False] == failed
    assert result.code == (1 if failed else 0)
    assert ("FAILED" in result.err) == bool(failed)
    assert Path("out/quantized.mge").exists()
    values = {check["name"]: check["value"] for check in checks}
    if "min_sqnr" in values:
        assert values["min_sqnr"] == json.loads(Path("out/verdict.json").read_text())["verdict"]["sqnr_db"]


def test_the_drop_of_the_metric_that_is_named(call, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("gate_metrics.py").write_text(
        "calls = []\n\n\ndef falling(model):\n    calls.append(1)\n    return 92.0 - len(calls)\n"
    )
    monkeypatch.syspath_prepend(".")
    limited = call(
        *CALIBRATE, "-o", "a", "--metric", "gate_metrics:falling", expect="metric: falling, max_drop: 0.5"
    )
    check = json.loads(limited.out)["expect"][0]["checks"][0]
    assert abs(check["value"]) == 1.0
    assert limited.code == int(check["value"] > 0.5)
    other = call(
        *CALIBRATE, "-o", "b", "--metric", "gate_metrics:falling", expect="metric: top1, max_drop: 0.5"
    )
    assert other.code == 0
    assert "--metric names no function top1" in other.err


def test_export_and_bench_fail_on_missed_limits(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "peak_memory", lambda *_: None)
    limits = "max_megabytes: 0.001, max_milliseconds: 1000"
    assert call(*CALIBRATE, "-o", "out", expect=limits).code == 1
    exported = call("export", "out/quantized.mge", "-o", "int8.onnx", "--json", expect=limits)
    assert exported.code == 1
    assert Path("int8.onnx").exists()
    [result] = json.loads(exported.out)["expect"]
    assert result["subject"] == "int8.onnx"
    assert [check["passed"] for check in result["checks"]] == [False, True]
    assert call("export", "float.mge", "-o", "float.onnx").code == 0
    bench = ("bench", "float.onnx", "int8.onnx", "--seconds", "0", "--json", "--recipe", "r.yaml")
    kept = call(*bench, expect="max_megabytes: 1, max_milliseconds: 1000")
    assert kept.code == 0
    assert [entry["subject"] for entry in json.loads(kept.out)["expect"]] == ["int8.onnx"]
    broken = call(*bench, expect="max_milliseconds: 0.0001")
    assert broken.code == 1
    assert "expected of int8.onnx" in broken.err
    assert "measured, the median" in broken.err
    nothing = call(*bench)
    assert nothing.code == 2
    assert "r.yaml expects nothing that could be checked" in nothing.err
