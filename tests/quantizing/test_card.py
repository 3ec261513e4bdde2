"""The card of a file says what it is, and is measured."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.quantizing.card import Card, measure_speed
from qtrace.quantizing.quantized import Quantized


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
    assert card.bytes == os.path.getsize(result.path)
    assert sum(card.precision.values()) == 2
    assert card.macs == (sum(explained["macs"].values()), explained["macs"]["int8"])
    assert [dict(f.kinds) for f in card.floats] == [entry["kinds"] for entry in explained["floats"]]
    assert card.inputs == {"x": (8, 3, 8, 8)}
    assert card.verified is not None
    assert card.verified <= 1
    text = card.table()
    for part in ("onnxruntime", "4 samples", "LSB at most", "megengine 1.13.0", "verdict", "metric"):
        assert part in text, part
    assert "schema: qtrace/1" in card.recipe


def test_the_card_has_the_time_of_each_stage(result: Quantized, card: Card) -> None:
    assert list(card.stages) == [
        "import",
        "prepare",
        "calibrate",
        "judge",
        "export",
        "verify",
        "measure the file",
    ]
    assert card.stages == result.seconds
    assert all(seconds > 0 for seconds in card.stages.values())
    assert card.to_dict()["stage_seconds"].keys() == card.stages.keys()
    assert "calibrate" in card.table()


def test_the_time_is_measured_beside_float(card: Card) -> None:
    assert card.timing is not None
    assert card.untimed == ""
    assert card.timing.milliseconds > 0
    assert card.timing.speed == pytest.approx(card.timing.float_milliseconds / card.timing.milliseconds)
    assert f"{card.timing.speed:.2f}x" in card.table()


def test_a_device_that_is_not_here_is_not_timed(result: Quantized, card: Card) -> None:
    timing, reason = measure_speed(result.path, result.traced, "qnn")
    assert timing is None
    assert "no runtime here runs it" in reason
    assert measure_speed(result.path.with_suffix(".mge"), result.traced, "megengine")[0] is None


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
    assert stored["time"]["speed"] > 0
    assert stored["verdict"]["groups"][0]["name"]
    tags = _Tags()
    tags.feed(page.read_text())
    assert tags.open == []
    assert "http" not in page.read_text()  # it needs nothing else


def test_the_command_writes_the_card(tmp_path: Path) -> None:
    from qtrace.cli import main

    np.save(tmp_path / "x.npy", X)
    qtrace.save(qtrace.trace(_Net(), X[:2]), tmp_path / "net.mge")
    out = tmp_path / "net.onnx"
    arguments = ["quantize", str(tmp_path / "net.mge"), "--data", str(tmp_path / "x.npy"), "-o", str(out)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--card"])
    assert ended.value.code == 0
    assert {p.name for p in tmp_path.glob("*.card.*")} == {"net.onnx.card.json", "net.onnx.card.html"}


def test_a_folder_that_is_missing_is_one_sentence(card: Card, tmp_path: Path) -> None:
    with pytest.raises(qtrace.QtraceError, match="cannot be written"):
        card.save(tmp_path / "gone" / "net.onnx")
