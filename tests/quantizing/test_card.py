"""The card of a file says what it is, and is measured."""

from __future__ import annotations

import html
import json
import os
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.preparation.annotation import PlacementNote, PlacementRow
from qtrace.quantizing.quantized import Card, Quantized, _group_floats


class _Net(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = M.Conv2d(3, 8, 3), M.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.fc(F.mean(F.silu(self.conv(x)), (2, 3)))


X = np.random.RandomState(0).rand(16, 3, 8, 8).astype("float32")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    path = tmp_path_factory.mktemp("card") / "net.onnx"
    return qtrace.quantize(_Net(), X, path, metric=lambda graph: 1.0, progress=False)


@pytest.fixture(scope="module")
def card(result: Quantized) -> Card:
    return result.card


def test_the_card_says_what_the_file_is(result: Quantized, card: Card) -> None:
    explained = result.explain().to_dict()["summary"]
    figures = card.figures
    assert figures["bytes"] == os.path.getsize(result.path)
    assert sum(figures["precision"].values()) == 2
    assert figures["macs"] == sum(explained["macs"].values())
    assert figures["integer_macs"] == explained["macs"]["int8"]
    assert figures["inputs"] == {"x": [8, 3, 8, 8]}
    assert figures["worst_lsb"] <= 1
    text = card.table()
    for part in ("onnxruntime", "4 held-back samples", "verified", "megengine 1.13.0", "verdict", "metric"):
        assert part in text, part
    assert "schema: qtrace/1" in card.recipe


def test_the_card_has_the_time_of_each_stage(result: Quantized, card: Card) -> None:
    stages = card.to_dict()["stage_seconds"]
    assert {"import", "prepare", "calibrate", "judge", "export", "verify"} <= set(stages)
    assert stages == result.seconds
    assert all(seconds > 0 for seconds in stages.values())
    assert "calibrate" in card.table()


def test_card_and_terminal_show_the_same(result: Quantized, card: Card) -> None:
    """No figure is measured for the card alone."""
    assert card.lines == tuple(result.summary()[1:])
    stored, told = card.to_dict(), result.to_dict()
    for name in ("speed", "not_timed", "delivered"):
        assert stored[name] == told[name]
    for line in card.lines:
        assert line in html.unescape(card.html())


def test_what_stays_in_float_is_grouped_by_reason(result: Quantized, card: Card) -> None:
    reasons = [ops.reason for ops in card.floats]
    assert len(reasons) == len(set(reasons))
    entries = result.explain().to_dict()["summary"]["floats"]
    counted = sum(count for ops in card.floats for count in ops.kinds.values())
    assert counted == sum(count for entry in entries for count in entry["kinds"].values())


def test_reasons_that_differ_in_numbers_alone_are_one() -> None:
    reasons = [
        "on integers it takes 0.05 ms longer",
        "it spans 8 bits",
        "on integers it takes 2e-3 ms longer",
    ]
    floats = [{"reason": reason, "kinds": {"mul": 1}} for reason in reasons]
    explanation = SimpleNamespace(to_dict=lambda: {"summary": {"floats": floats}})
    grouped = {ops.reason: dict(ops.kinds) for ops in _group_floats(explanation)}
    assert grouped == {
        "on integers it takes 2e-3 to 0.05 ms longer": {"mul": 2},
        "it spans 8 bits": {"mul": 1},
    }


def test_the_layers_that_the_noise_comes_from_are_drawn(tmp_path: Path) -> None:
    options = {"measure": False, "verify": False, "progress": False, "recipe": "w8a8"}
    card = qtrace.quantize(_Net(), X, tmp_path / "net.onnx", **options).card
    assert card.noise
    assert list(card.noise.values()) == sorted(card.noise.values(), reverse=True)
    assert 0.0 < sum(card.noise.values()) <= 1.0 + 1e-9
    assert card.html().count("<span class=bar") == len(card.noise)
    assert "<details><summary>Recipe</summary>" in card.html()


def test_the_choice_is_shown_in_rows(result: Quantized, card: Card) -> None:
    rows = (
        PlacementRow("fastest", 1.55, 17.1, "y", int(1.2 * 2**20)),
        PlacementRow("balanced", 1.24, 26.5, "y", int(1.6 * 2**20)),
        PlacementRow("float", 1.0, None, "", int(4.7 * 2**20)),
    )
    shown = replace(card, placement=PlacementNote("balanced", "t", 1.0, 1.24, rows=rows, chosen="balanced"))
    assert "<td>* balanced</td><td>1.24x</td><td>26.5</td><td>1.60 MB</td>" in shown.html()
    assert [row["sqnr"] for row in shown.to_dict()["choice"]] == [17.1, 26.5, None]
    if result.placement is not None:
        assert all(line in result.summary() for line in result.placement.choice_lines())


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_card_is_written_beside_the_file(result: Quantized, card: Card) -> None:
    data, page = card.save(result.path)
    assert (data.name, page.name) == ("net.onnx.card.json", "net.onnx.card.html")
    stored = json.loads(data.read_text())
    assert stored == json.loads(json.dumps(card.to_dict()))
    assert stored["verdict"]["groups"][0]["name"]
    tags = _Tags()
    tags.feed(page.read_text())
    assert tags.open == []
    assert "http" not in page.read_text()  # it needs nothing else


def test_the_command_writes_the_card(tmp_path: Path) -> None:
    from qtrace.cli import main

    np.save(tmp_path / "x.npy", X)
    qtrace.save(qtrace.trace(_Net(), X[:2], check=False), tmp_path / "net.mge")
    out = tmp_path / "net.onnx"
    arguments = ["quantize", str(tmp_path / "net.mge"), "--data", str(tmp_path / "x.npy"), "-o", str(out)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--card"])
    assert ended.value.code == 0
    assert {p.name for p in tmp_path.glob("*.card.*")} == {"net.onnx.card.json", "net.onnx.card.html"}


def test_a_folder_that_is_missing_is_one_sentence(card: Card, tmp_path: Path) -> None:
    with pytest.raises(qtrace.QtraceError, match="cannot be written"):
        card.save(tmp_path / "gone" / "net.onnx")
