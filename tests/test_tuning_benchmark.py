"""The rows of the benchmark of searches; its figures are stored, not measured here."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.deployed import rows, tuning
from benchmarks.deployed.tuning import RESULTS, TunedRow, main, merged, read, rival, table

ROW = TunedRow("detector", 30, 600.0, "trial 7, search", 28.0, 30.0, (1.4, 1.3, 1.5), 1, {"IoU": 0.99})
OTHER = dataclasses.replace(ROW, net="classifier")


def test_new_rows_replace_those_of_the_same_network() -> None:
    new = dataclasses.replace(ROW, sqnr=31.0)
    assert merged([OTHER, ROW], [new]) == [new, OTHER]


def test_the_rival_is_the_best_row_of_qtrace_that_is_as_fast() -> None:
    measured = [
        rows.Row("detector", "balanced", 28.0, 1.40),
        rows.Row("detector", "point 4", 38.0, 1.25),
        rows.Row("detector", "fastest", 17.0, 1.54),
        rows.Row("detector", "float", None, 1.0),
        rows.Row("detector", "NNCF, fast bias correction", 35.0, 2.0),
        rows.Row("classifier", "balanced", 50.0, 2.0),
    ]
    found = rival(ROW, measured)
    assert found is not None
    assert found.variant == "balanced"
    assert rival(dataclasses.replace(ROW, speed=(9.0, 9.0, 9.0)), measured) is None
    assert "balanced: 28.0 dB, 1.40x" in table([ROW], measured)


def test_measured_rows_are_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tuned.json"
    monkeypatch.setattr(tuning, "measure", lambda name, settings: ROW)
    monkeypatch.setattr(tuning.rows, "read", lambda path: [])
    assert main(["--net", "detector", "--json", str(file)]) == 0
    assert read(file) == [ROW]
    assert "cpu" in json.loads(file.read_text(encoding="utf-8"))["machine"]
    assert main(["--table", "--json", str(file)]) == 0
    assert "1.40x (1.30 to 1.50)" in capsys.readouterr().out
    better = rows.Row("detector", "balanced", 35.0, 1.5)
    monkeypatch.setattr(tuning.rows, "read", lambda path: [better])
    assert main(["--table", "--json", str(file)]) == 1
    assert asdict(read(file)[0]) == asdict(ROW)


def test_stored_searches_keep_the_integers_and_lose_where_the_page_says_so() -> None:
    found = read(RESULTS)
    assert len(found) == 7
    assert max(row.worst_lsb for row in found) <= 1
    assert {row.net for row in found if row.sqnr < row.before - 0.5} == {"recogniser"}
