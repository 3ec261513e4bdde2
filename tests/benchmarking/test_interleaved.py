"""Files in turns: how long they may take, and how far the answer may be off if there were few turns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from qtrace.benchmarking import files as timing
from qtrace.errors import ExportError
from tests.each import each_of


class _Files:
    """Files whose runs take a given time of a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        self.now, self.runs, self.seconds, self.wobble = 0.0, 0, seconds, 0.01
        self.cold, self.last = 1.0, ""  # how many times as long a run takes after one of another file
        clock = SimpleNamespace(**dict.fromkeys(("perf_counter", "thread_time", "process_time"), self._now))
        monkeypatch.setattr(timing, "time", clock)
        monkeypatch.setattr(timing, "_busy_seconds", self._now)  # nothing else runs
        monkeypatch.setattr(timing, "open_file", self._open)
        self.paths = [Path(f"{number}.onnx") for number in range(len(seconds))]

    def _now(self) -> float:
        return self.now

    def _open(self, path: Path, *args: object) -> SimpleNamespace:
        def run() -> float:
            self.runs += 1
            taken = self.seconds[int(path.stem)] * (1 + self.wobble * (self.runs % 3))
            taken *= 1.0 if self.last == path.stem else self.cold
            self.last = path.stem
            self.now += taken
            return taken

        run()
        return SimpleNamespace(run=run, in_thread=True)


@each_of("count", [2, 3, 4])
def test_compare_files_gives_no_file_a_faster_place(monkeypatch, count: int) -> None:
    files = _Files(monkeypatch, *(0.01,) * count)
    files.cold, files.wobble = 1.5, 0.001
    speeds = timing.compare_files(files.paths)
    assert [speed.ratio for speed in speeds] == pytest.approx([1.0] * count, rel=0.02)


@each_of(
    ("seconds", "most", "least"),
    [
        ((0.3,) * 5, 9.0, 3),
        ((0.3,) * 5, 30.0, 7),
        ((0.1,) * 5, 3.5, 3),
        ((1.0, 2.0), 30.0, 5),
        ((0.001,) * 5, 2.0, 50),
    ],
)
def test_slow_files_have_fewer_turns_within_the_time_they_may_take(monkeypatch, seconds, most, least) -> None:
    files = _Files(monkeypatch, *seconds)
    speeds = timing.compare_files(files.paths, seconds=min(most, 3.0), most=most)
    assert files.now < 1.05 * most
    assert all(speed.turns >= least for speed in speeds)
    assert speeds[-1].ratio == pytest.approx(seconds[0] / seconds[-1], rel=0.03)


def test_compare_files_refuses_too_slow_files_after_two_runs(monkeypatch) -> None:
    files = _Files(monkeypatch, 2.0, 2.0, 2.0, 2.0)
    with pytest.raises(
        ExportError, match=r"a run of 0.onnx takes 2.04 s: 4 files cannot be compared within 30 s"
    ):
        timing.compare_files(files.paths)
    assert files.runs == 2


def test_a_round_ends_where_all_ratios_are_narrow(monkeypatch) -> None:
    files = _Files(monkeypatch, 0.02, 0.01)
    files.wobble = 0.02
    assert all(speed.turns > 14 for speed in timing.compare_files(files.paths, seconds=3.0))
    files = _Files(monkeypatch, 0.02, 0.01)
    files.wobble = 0.004
    speeds = timing.compare_files(files.paths, seconds=3.0)
    assert [speed.turns for speed in speeds] == [14] * 2
    assert [speed.ratio for speed in speeds] == pytest.approx([1.0, 2.0], rel=0.01)


def test_a_round_ends_where_its_speeds_decide(monkeypatch) -> None:
    """After seven turns, and in each round: memory may lie otherwise in the second one."""
    asked: list[int] = []

    def is_enough(speeds: list[timing.Speed]) -> bool:
        assert speeds[1].ratio == pytest.approx(2.0, rel=0.05)
        asked.append(speeds[0].turns)
        return len(asked) > 2

    files = _Files(monkeypatch, 0.02, 0.01)
    files.wobble = 0.02
    speeds = timing.compare_files(files.paths, seconds=3.0, settled=is_enough)
    assert asked == [7, 8, 9, 16]
    assert [speed.turns for speed in speeds] == [16, 16]


@each_of(
    ("low", "high", "clear"),
    [(1.5, 1.6, True), (0.8, 0.87, True), (1.5, 1.7, False), (0.98, 1.04, False), (0.5, 0.6, False)],
)
def test_a_speed_is_clear_if_its_narrow_range_says_which_is_faster(
    low: float, high: float, clear: bool
) -> None:
    whole, own = timing.Speed(1.0, 1.0, 1.0, 1.0, 14), timing.Speed(1.0, low, low, high, 14)
    assert own.clear is clear
    assert timing.are_clear([whole, own]) is clear
    assert not timing.are_clear([whole, own, timing.Speed(1.0, 1.0, 0.99, 1.01, 14)])


def test_few_turns_widen_the_range_of_a_ratio() -> None:
    """Three ratios have a far wider range than nine; a clear difference stays clear."""
    own = [1.0, 1.01, 0.99]
    _, few = timing.summarize([[[0.5] * 3, own]])
    _, many = timing.summarize([[[0.5] * 9, own * 3]])
    assert (many.low, many.high) == (0.5 / 1.01, 0.5 / 0.99)
    assert few.high - few.low > 3 * (many.high - many.low)
    assert few.slower
    assert not timing.summarize([[[0.95] * 3, own]])[1].slower
