"""The benchmark of peaks of memory measures calls in processes of their own; its figures are for the docs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import peaks
from benchmarks.large import Layout, resident, restart_peak, write_network

CASE = peaks.Case(
    *((3, 8, 8), 4, 3_000_000, 10_000_000, {"import": 5_000_000, "calibrate": 40_000_000}),
    *(0.5, {"import": 1.0, "calibrate": 6.0}, 2.4),
)


def test_a_stage_beyond_its_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CASE.shares() == {"import": (0.5, 0.5), "calibrate": (4.0, 3.0)}
    assert CASE.exceeded() == []
    monkeypatch.setitem(peaks.BUDGET, "calibrate", (3, 3))
    assert CASE.exceeded() == ["4 of 3x8x8: the peak of calibrate is 4 float runs, and its budget is 3."]
    monkeypatch.setitem(peaks.BUDGET, "calibrate", (4, 2))
    assert [sentence.split(" is ")[0] for sentence in CASE.exceeded()] == [
        "4 of 3x8x8: the processor time of calibrate"
    ]


def test_a_row_has_the_largest_peak_and_its_stage() -> None:
    case = CASE
    assert case.cells() == ("3x8x8", "4", "3", "10", "40", "calibrate", "2")
    assert "calibrate" in peaks.table([case])


def test_a_peak_begins_anew() -> None:
    block = np.ones(32 << 20, np.float64)
    assert min(resident("VmHWM"), resident("VmRSS")) >= block.nbytes
    del block
    high = resident("VmHWM")
    restart_peak()
    assert resident("VmHWM") < high - (128 << 20)


@pytest.mark.slow
def test_both_runs_of_a_network_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_network(tmp_path / "net.onnx", Layout(megabytes=0.1, width=64))
    monkeypatch.setitem(peaks.BUDGET, "prepare", (0, 0))  # which no machine keeps
    assert peaks.main([str(tmp_path / "net.onnx"), "--shape", "64", "--images", "16"]) == 1
    printed, complaint = capsys.readouterr()
    assert "the processor time of prepare is" in complaint
    assert "calibrate" in printed
    assert "16 of 64" in printed
