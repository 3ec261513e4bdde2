"""The rows of the benchmark of other runtimes; its figures are stored, not measured here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.deployed import runtimes
from benchmarks.deployed.runtimes import RESULTS, RuntimeRow, main, merged, read, table

OLD = RuntimeRow("detector", "openvino", "balanced", 20.0, (1.2, 1.1, 1.3), 9.0, 11.0, 1, 0.99999)
NEW = RuntimeRow("detector", "openvino", "balanced", 28.0, (1.4, 1.3, 1.5), 8.0, 11.0, 1, 0.99999)
MISSING = RuntimeRow("detector", "litert", "fastest", reason="no kernel")


def test_new_rows_replace_those_of_the_same_file() -> None:
    assert merged([MISSING, OLD], [NEW]) == [NEW, MISSING]


def test_the_table_has_figures_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runtimes.json"
    file.write_text(json.dumps({"rows": [asdict(NEW), asdict(MISSING)]}), encoding="utf-8")
    assert main(["--table", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "1.40x (1.30..1.50)" in printed
    assert "99.9990%" in printed
    assert "no file: no kernel" in printed


def test_measured_rows_are_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "runtimes.json"
    monkeypatch.setattr(runtimes, "measure", lambda net, runtime, variants, nncf: [NEW])
    assert main(["--net", "detector", "--runtime", "openvino", "--json", str(file)]) == 0
    assert [(row.net, row.sqnr) for row in read(file)] == [("detector", 28.0)]


def test_stored_rows_of_placed_files_are_at_most_one_step_off() -> None:
    rows = [row for row in read(RESULTS) if row.worst_lsb is not None]
    placed = [row for row in rows if row.mode in ("balanced", "fastest")]
    assert len(placed) >= 10
    assert max(row.worst_lsb or 0 for row in placed) <= 1
    assert table(rows)
