"""The rows of the benchmark of runtimes that ship; its figures are stored, not measured here."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.shipped import __main__ as benchmark
from benchmarks.shipped import sides
from benchmarks.shipped.__main__ import main
from benchmarks.shipped.rows import FLOAT, OWN, RESULTS, RUNTIMES, ShippedRow, cells, merged, read, summary
from tests.each import each_of

PEER = RUNTIMES["litert"][0]
EXACT = ShippedRow("classifier", "litert", FLOAT, "2.3.0", "cpu", {"out": 300.0}, {}, 2.0, (1.0, 1.0, 1.0))
OURS = replace(EXACT, variant=OWN, db={"boxes": 31.0, "scores": 28.0}, against={PEER: (1.2, 1.1, 1.3)})
THEIRS = replace(EXACT, variant=PEER, db={"boxes": 30.0, "scores": 20.0})
FAILED = replace(EXACT, net="detector", variant=PEER, db={}, reason="ValueError: ranks")


def test_new_rows_replace_those_of_the_same_file_in_order() -> None:
    newer = replace(OURS, milliseconds=1.0)
    assert merged([FAILED, THEIRS, OURS], [newer, EXACT]) == [FAILED, EXACT, newer, THEIRS]


def test_the_worst_group_decides() -> None:
    rows = [EXACT, OURS, THEIRS]
    assert "1 of 1, with no more noise in the worst group of 1 of 1 trained networks" in summary(
        rows, "litert"
    )
    noisy = [EXACT, replace(OURS, db={"boxes": 40.0, "scores": 19.0}), THEIRS]
    assert "no more noise in the worst group of 0 of 1" in summary(noisy, "litert")
    slow = [EXACT, replace(OURS, against={PEER: (0.9, 0.85, 0.95)}), THEIRS]
    assert f"as fast as {PEER} or faster, within the range: 0 of 1" in summary(slow, "litert")


def test_cells_show_groups_reasons_and_float_that_was_delivered() -> None:
    assert cells(OURS)[2] == "31.0, 28.0"
    assert cells(THEIRS, OURS)[6] == "1.20x (1.10 to 1.30)"
    assert cells(FAILED)[2] == "no file: ValueError: ranks"
    assert cells(replace(OURS, on_integers=False))[1] == "qtrace: delivers float"


def test_the_command_stores_rows_and_prints_them(monkeypatch, tmp_path: Path, capsys) -> None:
    file = tmp_path / "shipped.json"
    monkeypatch.setattr(benchmark, "measure", lambda *args: [OURS, THEIRS])
    assert main(["--net", "classifier", "--runtime", "litert", "--json", str(file)]) == 0
    assert [row.variant for row in read(file)] == [OWN, PEER]
    assert json.loads(file.read_text(encoding="utf-8"))[0]["db"] == asdict(OURS)["db"]
    assert "31.0, 28.0" in capsys.readouterr().out


class _Process:
    """A process whose memory lies well or badly: it takes one time for as long as it lives."""

    opened: list[str] = []
    alive = 0

    def __init__(self, name: str, seconds: float) -> None:
        self.opened.append(name)
        self.seconds = seconds
        _Process.alive += 1

    def run(self, batch: np.ndarray) -> None:
        assert batch.shape == (1, 3)

    def time(self) -> float:
        return self.seconds

    def close(self) -> None:
        _Process.alive -= 1


def test_files_are_loaded_anew_and_the_range_holds_what_a_start_changes(monkeypatch) -> None:
    monkeypatch.setattr(_Process, "opened", [])
    lucky = iter([0.020, 0.014, 0.017])
    openers = [
        lambda: _Process("float", 0.034),
        lambda: _Process("qtrace", 0.017),
        lambda: _Process("peer", next(lucky)),
    ]
    rounds = sides.take_rounds(openers, np.zeros((1, 3)), turns=7, starts=3)
    assert _Process.opened == [
        "float",
        "qtrace",
        "peer",
        "qtrace",
        "peer",
        "float",
        "peer",
        "float",
        "qtrace",
    ]
    assert _Process.alive == 0
    rows = {name: replace(EXACT, variant=name) for name in (FLOAT, OWN, PEER)}
    benchmark._add_times([FLOAT, OWN, PEER], rounds, rows)
    assert rows[OWN].speed == pytest.approx((2.0, 2.0, 2.0))
    assert rows[OWN].against[PEER] == pytest.approx((1.0, 14 / 17, 20 / 17))


class _Cooling:
    """A file whose runs are slow until it has run some times in a row."""

    last: object = None
    settled = 0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def run(self, batch: np.ndarray) -> None:
        pass

    def time(self) -> float:
        _Cooling.settled = _Cooling.settled + 1 if _Cooling.last is self else 0
        _Cooling.last = self
        return self.seconds * max(1.0, 2.0 - 0.2 * _Cooling.settled)


@each_of("count", [2, 3, 4])
def test_no_place_in_the_turns_makes_a_file_faster(count: int) -> None:
    times = sides.run_interleaved([_Cooling(0.0015) for _ in range(count)], np.zeros((1, 3)), turns=9)
    assert np.median(times, axis=1) == pytest.approx([0.0015] * count)


def test_integers_at_the_ends_of_a_file_are_floats_outside() -> None:
    detail = {"dtype": "|i1", "quantization": [0.5, -3]}
    values = np.float32([-100.0, -0.25, 0.75, 1.2, 100.0])
    integers = sides._rounded(values, detail)
    assert integers.tolist() == [-128, -3, -1, -1, 127]  # ties go to even
    assert sides._floats(integers, detail).tolist() == [-62.5, 0.0, 1.0, 1.0, 65.0]
    assert sides._rounded(values, {"dtype": "<f4", "quantization": [0.0, 0]}) is values


@pytest.mark.parametrize("runtime", ["litert", "ncnn"])
def test_stored_rows_have_versions_processors_and_times(runtime: str) -> None:
    rows = [row for row in read(RESULTS) if row.runtime == runtime and not row.reason]
    assert len({row.net for row in rows}) >= 4
    assert all(row.version and row.processor and row.milliseconds and row.measured for row in rows)
