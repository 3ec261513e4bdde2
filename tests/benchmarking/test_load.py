"""What other programs take of the processor, by the counters of Linux."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from qtrace.benchmarking import files
from qtrace.benchmarking import files as load
from qtrace.benchmarking.files import summarize, watched_load
from tests.each import each_of


def _write_stat(path: Path, worked: float) -> None:
    ticks = int(worked * load.os.sysconf("SC_CLK_TCK"))
    path.write_text(f"cpu  {ticks} 0 0 123456 789 0 0 0 55 66\ncpu0 1 1 1 1\n")


@each_of(("worked", "share", "busy"), [(3.0, 0.0, False), (4.0, 0.125, False), (7.0, 0.5, True)])
def test_the_work_of_others_is_that_of_all_cores_less_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worked: float, share: float, busy: bool
) -> None:
    """Two cores in 4 s, of which this process works 3 s."""
    stat = tmp_path / "stat"
    monkeypatch.setattr(load, "_STAT", stat)
    monkeypatch.setattr(load.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(load.time, "perf_counter", itertools.count(100.0, 4.0).__next__)
    monkeypatch.setattr(load.time, "process_time", itertools.count(10.0, 3.0).__next__)
    _write_stat(stat, 1000.0)
    with watched_load() as found:
        _write_stat(stat, 1000.0 + worked)
    assert found.share == pytest.approx(share)
    assert found.is_busy is busy


@each_of("text", [None, "", "cpu x y\n"])
def test_unknown_load_counts_as_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    stat = tmp_path / "stat"
    if text is not None:
        stat.write_text(text)
    monkeypatch.setattr(load, "_STAT", stat)
    with watched_load() as found:
        pass
    assert not found.is_busy


def test_a_busy_machine_widens_the_range_and_says_so() -> None:
    rounds = [[[1.0] * 30, [1.1] * 30]]
    quiet, busy = (summarize(rounds, flag)[1] for flag in (False, True))
    assert quiet.slower
    assert not busy.slower
    assert busy.low == pytest.approx(quiet.low / files._BUSY_RANGE)
    assert busy.high == pytest.approx(quiet.high * files._BUSY_RANGE)
    assert busy.describe().endswith("as other programs kept the machine busy")
    assert not summarize(rounds, True)[0].busy
