"""qtrace diff of folders, models and recipes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import cli
from tests.nets import images, net

FIRST = "schema: qtrace/1\nbackend: generic\nobservers: {activation: minmax}\n"
SECOND = FIRST.replace("minmax", "{percentile: {percentile: 90}}")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> SimpleNamespace:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(args))
    captured = capsys.readouterr()
    return SimpleNamespace(code=caught.value.code, out=captured.out, err=captured.err)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("diff")
    x = images(16, 3, 8, 8)
    forward = lambda self, x: F.relu(self.conv(x))  # noqa: E731
    qtrace.save(
        qtrace.trace(net(forward, conv=M.Conv2d(3, 4, 3, padding=1)), x[:2], check=False), home / "float.mge"
    )
    np.save(home / "x.npy", x)
    for name, text in (("first", FIRST), ("second", SECOND)):
        (home / f"{name}.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for name in ("first", "second"):
            words = ["calibrate", "float.mge", "-d", "x.npy", "-r", f"{name}.yaml", "-o", name]
            with pytest.raises(SystemExit) as caught:
                cli.main([*words, "--batch-size", "2", "--quiet"])
            assert caught.value.code == (name == "second")  # whose verdict is broken
    return home


@pytest.fixture(autouse=True)
def there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def test_two_folders_with_the_figures_of_their_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "diff", "first", "second")
    assert result.code == 0
    assert result.out.startswith("A: first\nB: second\n")
    assert "observers.activation" in result.out
    assert "scales that moved" in result.out
    assert "output SQNR in dB" in result.out
    data = json.loads(run(capsys, "diff", "first", "second", "--json").out)
    sqnr = next(f for f in data["figures"] if f["name"] == "output SQNR in dB")
    verdict = json.loads(Path("first/verdict.json").read_text())
    assert sqnr["first"] == verdict["verdict"]["sqnr_db"]
    assert verdict["figures"]["macs"] > 0
    assert sqnr["first"] > sqnr["second"]  # a tenth of the values is clipped
    assert data["same"] is False


def test_every_column_group_of_the_verdicts_is_compared(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, ratio in (("first", 30.0), ("second", None)):
        shutil.copytree(home / name, tmp_path / name)
        file = tmp_path / name / "verdict.json"
        data = json.loads(file.read_text())
        group = data["verdict"]["groups"][0]
        columns = {"y, columns 0..3": 40.0, "y, columns 4..9": ratio}
        data["verdict"]["groups"] = [{**group, "name": n, "sqnr_db": v} for n, v in columns.items()]
        file.write_text(json.dumps(data))
    result = run(capsys, "diff", str(tmp_path / "first"), str(tmp_path / "second"), "--json")
    figures = {f["name"]: (f["first"], f["second"]) for f in json.loads(result.out)["figures"]}
    assert figures["SQNR in dB of y, columns 0..3"] == (40.0, 40.0)
    assert figures["SQNR in dB of y, columns 4..9"] == (30.0, None)


def test_the_exit_code_tells_a_difference_only_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "diff", "first", "second", "--exit-code").code == 1
    same = run(capsys, "diff", "first/prepared.mge", "first/quantized.mge", "--exit-code")
    assert same.code == 0
    assert "are the same" in same.out


def test_two_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "diff", "first.yaml", "second.yaml")
    assert result.code == 0
    assert "observers.activation" in result.out
    assert run(capsys, "diff", "int8", "int8", "--exit-code").code == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("first", "first.yaml"), "first.yaml is a recipe and first a model"),
        (("first", "nowhere"), "nowhere"),
        (("first", "float.mge"), "float.mge"),
        (("first", "."), ". is a folder without quantized.mge"),
        (("first.yaml", "missing.yaml"), "missing.yaml"),
    ],
)
def test_diff_refuses_wrong_arguments(
    capsys: pytest.CaptureFixture[str], words: tuple[str, str], problem: str
) -> None:
    result = run(capsys, "diff", *words)
    assert result.code == 2
    assert problem in result.err
    assert "Traceback" not in result.err


def test_a_damaged_verdict_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("first", "damaged", dirs_exist_ok=True)
    for text in ("{", "[]", '{"verdict": 3}'):
        Path("damaged/verdict.json").write_text(text)
        result: Any = run(capsys, "diff", "first", "damaged")
        assert result.code == 2
        assert "damaged/verdict.json cannot be read" in result.err


def test_onnx_files_are_compared_node_by_node(capsys: pytest.CaptureFixture[str]) -> None:
    for name, model in (("float", "float.mge"), ("int8", "first/quantized.mge")):
        assert run(capsys, "export", model, "-o", f"{name}.onnx", "--quiet").code == 0
    result = run(capsys, "diff", "float.onnx", "int8.onnx", "--exit-code")
    assert result.code == 1
    assert "runs on uint8 x int8" in result.out
    assert run(capsys, "diff", "int8.onnx", "int8.onnx", "--exit-code").code == 0
    document = json.loads(run(capsys, "diff", "float.onnx", "int8.onnx", "--json").out)
    assert {change["section"] for change in document["changes"]} >= {"nodes", "metadata", "rounded tensors"}


def test_an_onnx_file_beside_something_else_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "diff", "some.onnx", "first")
    assert result.code == 2
    assert "some.onnx is an ONNX file and first is not" in result.err
