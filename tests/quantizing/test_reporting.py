"""`StageTimes` adds up what a stage takes, and logs it."""

from __future__ import annotations

import logging
from itertools import count

import pytest

from qtrace.quantizing import reporting
from qtrace.quantizing.reporting import StageTimes


def test_a_stage_that_runs_again_adds_to_its_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ticks = count()
    monkeypatch.setattr(reporting.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(reporting.time, "process_time", lambda: 0.0)
    times = StageTimes()
    with caplog.at_level(logging.INFO, "qtrace"):
        with times.measure("raise layers"), times.measure("prepare"):
            pass
        with times.measure("prepare"):
            pass
    assert list(times.seconds.items()) == [("raise layers", 3.0), ("prepare", 2.0)]
    taken = ["prepare took 1.0 s", "raise layers took 3.0 s", "prepare took 1.0 s"]
    assert caplog.messages == [f"{text}, 0.0 s of processor time" for text in taken]


def test_a_stage_that_fails_has_its_time() -> None:
    times = StageTimes()
    with pytest.raises(ValueError, match="no"), times.measure("export"):
        raise ValueError("no")
    assert times.seconds.keys() == {"export"}


def test_what_a_stage_has_freed_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(reporting, "return_free_memory", lambda: calls.append("back"))
    with StageTimes().measure("judge"):
        assert not calls
    assert calls == ["back"]
