"""A merged recipe as text: the same config again, with every value at its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qtrace.config.recipe import SCHEMA, load_recipe
from qtrace.config.written import Entry, render, resolve_recipe
from tests.each import each_of

HEAD = "schema: qtrace/1\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _text(body: str) -> str:
    Path("mine.yaml").write_text(HEAD + body, encoding="utf-8")
    return resolve_recipe("mine.yaml").text()


@each_of(
    "body",
    [
        "",
        "rules:\n",
        "qat:\nweight: {}\n",
        "fakequant: {lsq: {a: {b: [1, 'x, y', null]}}}\n",
        "description: |\n  two\n  lines\n",
        "description: 'a: b # c'\n",
        "rules: [{match: {}, quantize: true}, {match: {op: a}, quantize: false}]\n",
        "observers: {activation: {mse: {bins: 10}}}\nregion: {outputs: ['x#*']}\n",
    ],
)
def test_text_of_odd_values(body: str) -> None:
    Path("again.yaml").write_text(_text(body), encoding="utf-8")
    assert load_recipe("again.yaml") == load_recipe("mine.yaml")


def test_comments_stand_above_what_they_were_written_for() -> None:
    Path("base.yaml").write_text(HEAD + "# From the base.\nqat:\n  # How fast.\n  lr: 0.1\n  epochs: 2\n")
    assert _text("imports: [base.yaml]\n# Of this file.\nqat: {epochs: 3, bn: {fold: true}}\n") == (
        "schema: qtrace/1\n"
        "# backend: onnxruntime  # the default\n"
        "\n"
        "qat:\n"
        "  # How fast.\n"
        "  lr: 0.1  # base.yaml:5\n"
        "\n"
        "  # Of this file.\n"
        "  epochs: 3  # mine.yaml:4\n"
        "  bn:\n"
        "    fold: true  # mine.yaml:4\n"
    )


def test_rules_have_a_line_each_for_reason_and_place() -> None:
    reason = "rules:\n  # A reason\n  # of two lines.\n"
    text = _text(f"{reason}  - {{match: {{op: add}}, quantize: false}}\n")
    assert text.endswith(f"\n{reason}  # mine.yaml:5\n  - match: {{op: add}}\n    quantize: false\n")


@given(
    st.text(max_size=30),
    st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
)
@example("\n\U00010000\U0001f600 \\\U00010000 \\ud800\\udc00", 0)
@settings(deadline=None, max_examples=25)
def test_any_value_survives(text: str, number: object) -> None:
    text = text.encode("utf-8", "ignore").decode("utf-8")
    found = (Entry(("fakequant",), {"lsq": {"x": text, "y": number}}, "a.yaml:3", ("why",)),)
    Path("any.yaml").write_text(render(found, SCHEMA), encoding="utf-8", newline="")
    assert load_recipe("any.yaml").fakequant.options == {"x": text, "y": number}
