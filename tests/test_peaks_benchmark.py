"""The benchmark of peaks of memory measures calls in processes of their own; its figures are for the docs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import peaks
from benchmarks.large import Layout, resident, restart_peak, write_network


def test_a_row_has_the_largest_peak_and_its_stage() -> None:
    case = peaks.Case(
        (3, 8, 8), 4, 3_000_000, 10_000_000, {"import": 5_000_000, "calibrate": 40_000_000}, 2.4
    )
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
def test_both_runs_of_a_network_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_network(tmp_path / "net.onnx", Layout(megabytes=0.1, width=64))
    assert peaks.main([str(tmp_path / "net.onnx"), "--shape", "64", "--images", "16"]) == 0
    printed = capsys.readouterr().out
    assert "calibrate" in printed
    assert "16 of 64" in printed
