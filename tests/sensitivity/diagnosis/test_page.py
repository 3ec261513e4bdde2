"""The commands on the page about verdicts run, one after the other, and do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sensitivity.diagnosis.test_planted import run

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "verdict.md"


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    code = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert code is not None
    exec(compile(code[1], str(PAGE), "exec", dont_inherit=True), {"__name__": "page"})
    commands = list(dict.fromkeys(re.findall(r"^(?:next: )?(qtrace .*)$", text, re.MULTILINE)))
    assert len(commands) == 4
    notes = [run(command) for command in commands]
    broken = ["verdict   broken" in note[1] + note[2] for note in notes]
    assert [note[0] for note in notes] == broken == [1, 0, 0, 1]
    before, after = notes[0][2], notes[1][2]
    assert "outlier-channels at relu_out" in before
    assert f"next: {commands[1]}\n" in before
    assert "verdict   good" in after
    assert notes[3][1].startswith("verdict   ")


def test_the_page_names_every_cause():
    from qtrace.sensitivity.diagnosis.causes import CURES

    causes = PAGE.read_text(encoding="utf-8").partition("\n## The causes\n")[2]
    named = set(re.findall(r"^\| `([a-z-]+)` \|", causes, re.MULTILINE))
    assert named == {*CURES, "rounding"}
