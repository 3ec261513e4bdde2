"""The parts of the OCR demo: rendering, decoding, metrics. The demo itself needs trained networks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from examples.ocr import client, decoding, demo, dropin, lines, metric, package, pages
from tests.each import each_of


def test_lines_are_the_same_every_time_and_parts_differ():
    first, again = lines.load("test", 4), lines.load("test", 2)
    for a, b in zip(first, again, strict=False):
        assert a.text == b.text
        np.testing.assert_array_equal(a.pixels, b.pixels)
    assert {line.text for line in first}.isdisjoint(line.text for line in lines.load("calibration", 4))


def test_a_line_fills_its_width_and_the_network_reads_zero_behind_it():
    drawn = lines.load("test", 30)
    short = next(line for line in drawn if line.width < lines.WIDTH)
    batch = lines.normalize([short])
    assert batch.shape == (1, 3, lines.HEIGHT, lines.WIDTH)
    assert not batch[0, :, :, short.width :].any()
    assert batch[0, :, :, : short.width].std() > 0.1
    assert all(0 < len(line.text) <= 22 for line in drawn)


def test_pages_are_the_same_every_time():
    np.testing.assert_array_equal(pages.load("test", 2)[1], pages.draw("test", 1))
    assert pages.normalize(pages.load("test", 2)).shape == (2, 3, pages.SIZE, pages.SIZE)
    assert (pages.draw("test", 0) != pages.draw("calibration", 0)).any()


def test_decoding_merges_repetitions_but_not_across_a_blank():
    classes = [1, 1, 0, 1, 2, 2, 3, 0]
    probabilities = np.eye(4, dtype=np.float32)[classes][None]
    assert decoding.decode(probabilities, ["", "a", "b", " "]) == ["aab"]


def test_decoding_refuses_other_characters():
    with pytest.raises(ValueError, match="3 classes, and its metadata 2"):
        decoding.decode(np.zeros((1, 2, 3)), ["", "a"])


def test_characters_come_from_the_metadata(tmp_path: Path):
    model = onnx.ModelProto()
    model.metadata_props.add(key="character", value="x\ny")
    onnx.save(model, str(tmp_path / "net.onnx"))
    assert decoding.read_characters(tmp_path / "net.onnx") == ["", "x", "y", " "]


@each_of(("a", "b", "edits"), [("", "abc", 3), ("abc", "abc", 0), ("kitten", "sitting", 3), ("ab", "ba", 2)])
def test_edit_distance(a: str, b: str, edits: int):
    assert metric.edit_distance(a, b) == metric.edit_distance(b, a) == edits


def test_rates_count_lines_and_characters():
    read, truth = ["abcd", "ab"], ["abcd", "abcdef"]
    assert metric.line_accuracy(read, truth) == 50
    assert metric.character_error_rate(read, truth) == 40


def test_iou_averages_pages_and_an_empty_page_that_stays_empty_is_right():
    reference = np.zeros((2, 1, 2, 2))
    reference[0, 0, 0] = 1
    maps = reference.copy()
    maps[0, 0, 0, 1] = 0
    assert metric.text_iou(maps, reference) == 0.75


def test_missing_networks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OCR_MODELS", str(tmp_path))
    with pytest.raises(package.MissingModelsError, match=package.RECOGNISER):
        package.models_folder()


def _row(name: str, accuracy: float, iou: float, worst: int | None) -> demo.Row:
    return demo.Row(name, accuracy, 1.0, iou, 1.0, 1.0, worst)


def test_missed_targets_name_what_is_too_low():
    rows = [_row("float", 97, 1, None), _row("int8", 94.5, 0.96, 1), _row("tuned", 96, 0.9, 2)]
    missed = demo.missed_targets(rows)
    assert [text.split(" is ")[0].split(" by ")[0] for text in missed] == [
        "line accuracy of int8",
        "IoU of int8, fine-tuned",
        "int8, fine-tuned differs",
    ]


def test_pages_have_the_size_that_is_asked_for_and_a_text_of_their_own():
    page = pages.draw("test", 3, (96, 140))
    assert page.shape == (96, 140, 3)
    np.testing.assert_array_equal(page, pages.draw("test", 3, (96, 140)))
    assert len(set(dropin.SIZES)) == 12
    assert set(dropin.SIZES).isdisjoint(dropin.CALIBRATION_SIZES)


def _of_client(name: str, agreement: float, seconds: float) -> dropin.Row:
    """Three passes; the last one of each row is slow."""
    passes = [{"det": seconds * slower, "cls": 0.5, "rec": 0.5} for slower in (1, 1, 2)]
    return dropin.Row(name, agreement, passes)


def test_the_client_must_read_as_with_float_and_be_faster():
    reference = _of_client("float", 100.0, 3.0)
    assert dropin.missed_targets([reference, _of_client("int8", 99.6, 2.0)]) == []
    missed = dropin.missed_targets([reference, _of_client("int8", 99.4, 2.5), _of_client("peer", 85.0, 1.0)])
    assert missed == [
        "the client reads 99.40 % as with float, 99.5 % needed",
        "the client's networks are 1.14 times as fast, 1.3 times needed",
    ]
    assert "1.33x (1.33 to 1.40)" in dropin.format_rows([reference, _of_client("int8", 99.6, 2.0)])
    assert dropin.to_dict([reference, _of_client("int8", 99.6, 2.0)])[1]["speeds"] == [4 / 3, 4 / 3, 1.4]
    assert dropin.to_dict([]) == []


class _FakeClient:
    def __init__(self, texts: dict[int, str]):
        self.texts, self.networks = texts, {name: SimpleNamespace(seconds=0.0) for name in client.NETWORKS}
        self.runs = 0

    def read(self, page: np.ndarray) -> str:
        self.runs += 1
        for network in self.networks.values():
            network.seconds += self.runs
        return self.texts[int(page[0])]


def test_clients_take_turns_and_each_pass_has_its_seconds():
    clients = {"float": _FakeClient({0: "ab", 1: "c"}), "int8": _FakeClient({0: "ab", 1: "d"})}
    texts, seconds = client.read_in_turns(clients, [np.array([0]), np.array([1])], 2)
    assert texts == {"float": ["ab", "c"], "int8": ["ab", "d"]}
    assert seconds["int8"] == [dict.fromkeys(client.NETWORKS, time) for time in (1 + 2, 3 + 4)]
