"""The rows and checks of the benchmark of deployed networks, which the tests do not measure."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy import peers
from benchmarks.deployed import __main__ as program
from benchmarks.deployed import checks, networks
from benchmarks.deployed.rows import (
    OWN_TIMES,
    PEERS,
    PLACEMENTS,
    TIMED,
    TRAINED_NETS,
    Row,
    merged,
    read,
    table,
)

MINMAX = "onnxruntime.quantization MinMax"
FULL = "NNCF, full bias correction"
OLD = Row("detector", "balanced", 20.0, 1.2, 1.1, 1.3, 30.0)
NEW = Row("detector", "balanced", 28.0, 1.4, 1.3, 1.5, 20.0)
BESIDE = Row("recogniser", MINMAX, 10.0, 1.3, 1.2, 1.4, 5.0)


def _verdicts(rows: list[Row]) -> dict[str, str]:
    return {check.name: check.verdict for check in checks.check(rows)}


def _peers(sqnr: float, speed: float) -> list[Row]:
    return [Row("detector", variant, sqnr, speed) for variant in PEERS]


def test_new_rows_replace_those_of_the_same_network_and_variant() -> None:
    assert merged([OLD], [BESIDE, NEW]) == [BESIDE, NEW]


def test_the_table_has_the_figures() -> None:
    line = table([NEW]).splitlines()[-1]
    assert [part in line for part in ("28.0", "1.40x (1.30..1.50)", "20.0")] == [True] * 3


def test_a_row_without_a_file_shows_its_reason() -> None:
    assert "no file: killed" in table([Row("detector", FULL, reason="killed")])


def test_stored_rows_are_printed_with_the_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deployed.json"
    file.write_text(json.dumps({"rows": [asdict(NEW)]}), encoding="utf-8")
    assert read(file) == [NEW]
    assert program.main(["--table", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "28.0" in printed
    assert "detector: speed of balanced against float" in printed


def test_without_rows_no_check_is_met() -> None:
    assert set(_verdicts([]).values()) == {checks.UNKNOWN}


def test_the_gain_is_against_the_best_peer() -> None:
    name = "detector: SQNR of balanced against the best peer"
    peers = _peers(10.0, 1.2)
    assert _verdicts([NEW])[name] == checks.UNKNOWN
    assert _verdicts([NEW, *peers[:-1]])[name] == checks.UNKNOWN
    assert _verdicts([NEW, *peers])[name] == checks.MET
    assert _verdicts([NEW, *peers[:-1], Row("detector", FULL, reason="killed")])[name] == checks.MET
    assert _verdicts([NEW, Row("detector", FULL, 27.5, 0.7)])[name] == checks.MISSED
    left = dataclasses.replace(NEW, mode="float")
    assert _verdicts([left, *peers])[name] == checks.MISSED


def test_a_peer_without_a_file_is_no_peer() -> None:
    failed = Row("detector", FULL, reason="killed")
    assert _verdicts([NEW, failed])["detector: SQNR of balanced against the best peer"] == checks.UNKNOWN


@pytest.mark.parametrize(("speed", "verdict"), [(1.25, checks.MET), (1.24, checks.MISSED)])
def test_speeds_have_targets(speed: float, verdict: str) -> None:
    row = Row("detector", "balanced", 28.0, speed)
    assert _verdicts([row])["detector: speed of balanced against float"] == verdict


def test_no_network_may_be_slower_than_float() -> None:
    name = "no network slower than float"
    assert _verdicts([NEW])[name] == checks.UNKNOWN
    every = [Row(net, "balanced", 30.0, 1.0) for net in (*TRAINED_NETS, *TIMED)]
    assert _verdicts(every)[name] == checks.MET
    slow = dataclasses.replace(every[0], speed=0.99)
    assert _verdicts([slow])[name] == checks.MISSED


def test_fastest_is_compared_with_the_quantizer_of_onnxruntime() -> None:
    rows = [Row("detector", "fastest", 14.0, 1.5), Row("detector", MINMAX, 10.0, 1.52)]
    verdicts = _verdicts(rows)
    assert verdicts["detector: fastest against onnxruntime's quantizer, speed"] == checks.MET
    assert verdicts["detector: fastest against onnxruntime's quantizer, SQNR"] == checks.MET
    rows[1] = Row("detector", MINMAX, 12.0, 1.6)
    verdicts = _verdicts(rows)
    assert verdicts["detector: fastest against onnxruntime's quantizer, speed"] == checks.MISSED
    assert verdicts["detector: fastest against onnxruntime's quantizer, SQNR"] == checks.MISSED


def test_a_peer_that_is_faster_and_more_accurate_dominates_a_point() -> None:
    slow_peer, better = Row("detector", FULL, 30.0, 0.7), Row("detector", MINMAX, 28.0, 1.5)
    assert checks.dominated(NEW, [slow_peer, NEW]) == []
    assert checks.dominated(NEW, [slow_peer, better]) == [MINMAX]


def test_no_placement_may_be_dominated_by_a_peer() -> None:
    name = "detector: placements"
    ours = [
        Row("detector", variant, 20.0 + number, 1.4 - number / 10)
        for number, variant in enumerate(PLACEMENTS)
    ]
    peers = _peers(10.0, 1.3)
    assert _verdicts(peers)[name] == checks.UNKNOWN
    assert _verdicts([*ours, *peers[1:]])[name] == checks.UNKNOWN
    assert _verdicts([*ours, *peers])[name] == checks.MET
    (missed,) = [c for c in checks.check([*ours, Row("detector", MINMAX, 21.0, 1.35)]) if c.name == name]
    assert (missed.verdict, missed.measured) == (checks.MISSED, f"dominated: fastest by {MINMAX}")


def test_losses_of_the_task_have_limits() -> None:
    def rows(accuracy: float, errors: float) -> list[Row]:
        exact = {"line accuracy": 98.0, "character error rate": 0.2}
        ours = {"line accuracy": accuracy, "character error rate": errors}
        return [Row("recogniser", "float", metrics=exact), Row("recogniser", "balanced", metrics=ours)]

    names = ("recogniser: loss of line accuracy", "recogniser: increase of character error rate")
    good, bad = _verdicts(rows(97.7, 0.25)), _verdicts(rows(97.6, 0.26))
    assert [good[name] for name in names] == [checks.MET] * 2
    assert [bad[name] for name in names] == [checks.MISSED] * 2
    iou = Row("detector", "balanced", metrics={"IoU": 0.987})
    assert _verdicts([iou])["detector: IoU with float's map"] == checks.MISSED


def test_times_of_calibration_are_compared_with_those_of_peers() -> None:
    name = f"detector: time of calibration, balanced / {FULL}"
    assert _verdicts([NEW, Row("detector", FULL, 20.0, 1.0, seconds=20.0)])[name] == checks.MET
    assert _verdicts([NEW, Row("detector", FULL, 20.0, 1.0, seconds=19.0)])[name] == checks.MISSED


@pytest.mark.parametrize(("predicted", "verdict"), [(1.14, checks.MET), (0.84, checks.MISSED)])
def test_predictions_may_be_off_by_15_percent(predicted: float, verdict: str) -> None:
    row = dataclasses.replace(NEW, milliseconds=1.0, predicted=predicted)
    assert _verdicts([row])["detector: predicted time against measured, balanced, packaged times"] == verdict


def test_parity_is_that_of_the_worst_file() -> None:
    good = dataclasses.replace(NEW, worst_lsb=1, equal=0.99995)
    bad = Row("detector", "fastest", worst_lsb=2, equal=0.9998)
    names = ("parity, op by op, without optimizations", "share of equal integers, op by op")
    assert [_verdicts([good])[name] for name in names] == [checks.MET] * 2
    assert [_verdicts([good, bad])[name] for name in names] == [checks.MISSED] * 2


def test_a_peer_that_fails_has_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit('no such op')", encoding="utf-8")
    monkeypatch.setattr(peers, "_ONNXRUNTIME_WORKER", worker)
    peer = peers.quantize_by_onnxruntime(tmp_path / "x.onnx", np.zeros((1, 1)), "MinMax", tmp_path)
    assert (peer.file, peer.reason) == (None, "no such op")
    worker.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", encoding="utf-8")
    peer = peers.quantize_by_onnxruntime(tmp_path / "x.onnx", np.zeros((1, 1)), "MinMax", tmp_path)
    assert peer.reason == "killed by signal 9, as when memory runs out"


def test_the_seconds_of_a_worker_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    text = (
        "import pathlib, sys; file = pathlib.Path(sys.argv[-1]); file.touch(); "
        "file.with_suffix('.seconds').write_text('2.5')"
    )
    worker.write_text(text, encoding="utf-8")
    monkeypatch.setattr(peers, "_ONNXRUNTIME_WORKER", worker)
    peer = peers.quantize_by_onnxruntime(tmp_path / "x.onnx", np.zeros((1, 1)), "MinMax", tmp_path)
    assert peer.seconds == 2.5


def test_rows_are_kept_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def measure(name: str, variants: list[str], tools: object, keep: object) -> None:
        asked.append((name, tuple(variants)))
        for variant in variants:
            keep(Row(name, variant, 10.0, 0.9, 0.8, 1.0))  # type: ignore[operator]

    monkeypatch.setattr(program, "measure", measure)
    file = tmp_path / "rows.json"
    options = ["--json", str(file), "--net", "classifier"]
    assert program.main([*options, "--only", "balanced"]) == 1
    assert program.main([*options, "--only", "balanced", "--only", "fastest", "--missing"]) == 1
    assert asked == [("classifier", ("balanced",)), ("classifier", ("fastest",))]
    assert [row.variant for row in read(file)] == ["balanced", "fastest"]
    assert all(row.machine for row in read(file))


def test_placements_by_own_times_need_a_table_and_their_predictions_count() -> None:
    assert set(OWN_TIMES) <= set(networks.variants_of("ResNet-18 96"))
    packaged = Row("detector", "balanced", 20.0, 1.4, milliseconds=10.0, predicted=20.0)
    own = Row("detector", "balanced, own times", 20.0, 1.4, milliseconds=10.0, predicted=11.0)
    name = "detector: predicted time against measured, balanced"
    for rows, verdict in (([packaged], checks.MISSED), ([packaged, own], checks.MET)):
        (found,) = [c for c in checks.check(rows) if c.name.startswith(name)]
        assert found.verdict == verdict


def test_every_network_has_variants() -> None:
    assert MINMAX in networks.variants_of("ResNet-18 96")
    assert {*PLACEMENTS, FULL} <= set(networks.variants_of("classifier"))


def test_every_second_line_is_turned() -> None:
    inputs, turned = networks.turned_lines("test", 2)
    assert inputs.shape == (2, 3, 48, 192)
    assert list(turned) == [0, 1]
    assert np.abs(inputs).max() <= 1.0
