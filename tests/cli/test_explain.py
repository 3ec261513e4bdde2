"""qtrace explain on real models: what each option prints and writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import cli
from tests.nets import images, net


def _forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    y = F.softmax(F.relu(self.conv(x)), axis=1)
    return self.fc(y.reshape(x.shape[0], -1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, traced and calibrated."""
    home = tmp_path_factory.mktemp("explain")
    module = net(_forward, conv=M.Conv2d(3, 4, 3, padding=1), fc=M.Linear(256, 2))
    x = images(2, 3, 8, 8)
    traced = qtrace.trace(module, x, check=False)
    qtrace.save(traced, home / "float.mge")
    prepared = qtrace.prepare(traced, {"rules": [{"match": {"op": "linear"}, "weight": {"bits": 4}}]})
    qtrace.calibrate(prepared, [x], progress=False)
    qtrace.save(prepared, home / "prepared.mge")
    return home


@pytest.fixture
def explain(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(folder)

    def call(*args: str) -> SimpleNamespace:
        with pytest.raises(SystemExit) as caught:
            cli.main(["explain", *args])
        captured = capsys.readouterr()
        return SimpleNamespace(code=caught.value.code, out=captured.out, err=captured.err)

    return call


def test_a_table_and_the_summary(explain: Any) -> None:
    result = explain("float.mge")
    assert result.code == 0
    assert "softmax_out" in result.out
    assert "What stays in float, and what would change it:" in result.out
    assert "- {match: {op: softmax}, quantize: true, activation: {bits: 16}}" in result.out
    assert "--all shows them" in result.out
    assert "\x1b" not in result.out
    assert len(explain("float.mge", "--all").out) > len(result.out)


def test_explain_json_holds_the_whole_report(explain: Any) -> None:
    data = json.loads(explain("prepared.mge", "--json").out)
    assert data["summary"]["ops"]["float"] == 1
    rule = {"match": {"op": "linear"}, "weight": {"bits": 4}}
    assert data["rules"] == [{"origin": "rules[0]", "comment": "", **rule}]
    weight = next(site for site in data["sites"] if site["name"] == "fc_weight")
    assert np.shape(weight["qparams"]["scale"]) == (2,)


def test_why(explain: Any) -> None:
    text = explain("prepared.mge", "--why", "fc").out
    assert text.startswith("fc_out\n  What")
    assert "Rule rules[0], match {op: linear}, changes weights from" in text
    data = json.loads(explain("prepared.mge", "--why", "fc", "--json").out)
    assert [story["name"] for story in data] == ["fc_out"]
    assert data[0]["reads"]
    unknown = explain("prepared.mge", "--why", "conv_oot")
    assert unknown.code == 2
    assert "the nearest are conv_out" in unknown.err
    assert unknown.err.count("\n") == 1
    assert unknown.out == ""


def test_dot_is_written_whole_or_not_at_all(
    explain: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = explain("float.mge", "--dot", "new/graph.dot")
    assert result.code == 0
    assert "softmax_out" in result.out
    assert "new/graph.dot is written" in result.err
    drawn = Path("new/graph.dot").read_text()
    assert drawn.startswith("digraph")
    monkeypatch.setattr(
        "qtrace.inspection.explanation.Explanation.dot", lambda self, every: "x" * 3 + "\ud800"
    )
    assert explain("float.mge", "--dot", "new/graph.dot").code != 0
    assert Path("new/graph.dot").read_text() == drawn
    assert [path.name for path in Path("new").iterdir()] == ["graph.dot"]
    assert explain("float.mge", "--dot", "new").code == 2
    assert explain("float.mge", "--dot", "other.dot", "--why", "nothing at all").code == 2
    assert not Path("other.dot").exists()


@pytest.mark.parametrize(("columns", "colour"), [(70, True), (120, True), (120, False)])
def test_explain_fits_the_width_of_the_terminal(
    explain: Any, monkeypatch: pytest.MonkeyPatch, columns: int, colour: bool
) -> None:
    seen: dict[str, Any] = {}

    def table(self: Any, width: int | None, **options: Any) -> str:
        seen.update(width=width, **options)
        return ""

    monkeypatch.setattr("qtrace.inspection.explanation.Explanation.table", table)
    explain("float.mge")
    assert seen == {"width": None, "every": False, "colour": False}
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("qtrace.cli.reports.on_terminal", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1") if not colour else monkeypatch.delenv("NO_COLOR", raising=False)
    explain("float.mge", "--all")
    assert seen == {"width": columns, "every": True, "colour": colour}


def test_explain(run, here, fakes):
    assert run("explain", "float.mge").out == "a table\n"
    document = json.loads(run("explain", "float.mge", "-r", "good", "--json").out)
    assert document == {"rows": [0.5], "ratio": None, "passed": True}
    assert fakes.calls["explain"][1] is not None


def test_explain_a_factory(run, here, fakes):
    assert run("explain", f"{here.module}:Net", "--shape", "1x4").code == 0
    assert "give --shape" in run("explain", f"{here.module}:Net").err
