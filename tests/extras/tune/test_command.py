"""``qtrace tune``: its files, its exit codes, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import qtrace
from qtrace import cli
from qtrace.extras.tune.command import tune
from qtrace.storage.outputs import locked
from tests.each import each_of
from tests.extras.tune.test_search import data, small

RECIPE = """schema: qtrace/1
# The device of the factory.
backend: generic
observers: {activation: minmax, weight: minmax}
activation: {bits: 5}
rules:
  # Scores stay exact.
  - {match: {op: linear, position: last}, quantize_output: false, optional: true}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    batches = data()
    qtrace.save(qtrace.trace(small(), batches[0], check=False), tmp_path / "float.mge")
    np.save("x.npy", np.concatenate(batches))
    np.save("unseen.npy", np.concatenate(batches)[:8] * 1.1)
    Path("mine.yaml").write_text(RECIPE)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["tune", "float.mge", "-d", "x.npy", "-r", "mine.yaml", "--batch-size", "4", *args])
    captured = capsys.readouterr()
    code = caught.value.code
    assert isinstance(code, int)
    return code, captured.out, captured.err


def test_a_search_writes_its_files_and_goes_on(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--trials", "4", "-e", "unseen.npy", "-o", "best")
    assert code == 0
    assert "best: trial" in out
    assert "on --evaluation, best:" in out
    assert err.count("\ntrial ") + err.startswith("trial ") == 4
    names = sorted(path.name for path in Path("best").iterdir())
    assert names == ["best.yaml", "search.json", "trials.jsonl", "tune.html", "tune.json"]
    assert "<svg" in Path("best/tune.html").read_text()
    assert qtrace.load_recipe("best/best.yaml").backend == "generic"
    text = Path("best/best.yaml").read_text()
    assert (
        "# trial 1, few-bits at relu_out_1: 5 bits leave 32 levels; 22.91 -> 38.08 dB\nactivation: {bits: 8}"
        in text
    )
    assert run(capsys, "--trials", "1", "-o", "first")[0] == 0
    text = Path("first/best.yaml").read_text()
    assert "# The device of the factory.\nbackend: generic" in text
    assert "  # Scores stay exact.\n  - " in text
    code, out, err = run(capsys, "--trials", "5", "--json", "-o", "best")
    assert code == 0
    assert "going on after 4 trials" in err
    assert json.loads(out)["trials"] == 5
    assert (
        json.loads(out)["best"]["digest"] == json.loads(Path("best/tune.json").read_text())["best"]["digest"]
    )


def test_no_recipe_within_the_limits_is_exit_code_1(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--trials", "2", "--size", "1B", "-o", "best")
    assert code == 1
    assert "no recipe of 2 trials is within the limits" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--budget", "soon"), "'soon' is no time such as 30m"),
        (("--budget", "0m"), "'0m' is no time"),
        (("--at-most", "2 parsecs"), "is no time such as 2.0ms"),
        (("--size", "4"), "'4' is no size such as 4MB"),
        (("-d", "."), "give --image-size, --scale, --mean, --std and --channels"),
        (("-d", ".", "--mean", "0"), "says nothing of images, so give --image-size and --std"),
        (("--trials", "0"), "0 is not in the range"),
        (("--metric", "nowhere"), "--metric nowhere is no function"),
        (("--evaluation", "none.npy"), "--evaluation none.npy: there is no such file"),
        (("--at-most", "2ms"), "backend generic lacks measured times"),
        (("--batch-size", "64"), "there is one batch only"),
    ],
)
def test_mistakes_are_one_sentence(
    place: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, *args, "-o", "best")
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not Path("best").exists()


def test_a_folder_in_use_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("best").mkdir()
    with locked(Path("best/.lock"), "best"):
        code, _, err = run(capsys, "--trials", "1", "-o", "best")
    assert code == 2
    assert "is being written by process" in err


def test_force_begins_anew(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "--trials", "2", "-o", "best")
    code, _, err = run(capsys, "--trials", "1", "--seed", "2", "-o", "best")
    assert code == 2
    assert "another seed" in err
    code, out, _ = run(capsys, "--trials", "1", "--seed", "2", "--force", "--json", "-o", "best")
    assert (code, json.loads(out)["trials"]) == (0, 1)


@each_of(
    ("option", "text", "number"),
    [
        ("budget", "30m", 1800.0),
        ("budget", "90s", 90.0),
        ("budget", "2h", 7200.0),
        ("at_most", "2.0ms", 2.0),
        ("at_most", "500us", 0.5),
        ("size", "4MB", 4 * 2**20),
        ("size", "10kb", 10240),
    ],
)
def test_quantities_have_units(option: str, text: str, number: float) -> None:
    parameter = next(p for p in tune.params if p.name == option)
    assert parameter.type.convert(text, parameter, None) == pytest.approx(number)


def test_help_names_the_files() -> None:
    text = CliRunner().invoke(tune, ["--help"]).output
    for name in ("trials.jsonl", "best.yaml", "tune.json", "tune.html"):
        assert name in text
