"""Commands that are killed, interrupted or refused the disk: their outputs are old or new, never between."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.changes import turning_points

ROOT = Path(__file__).parents[1]

WRITER = """
import os, signal, sys
from pathlib import Path
from benchmarks import changes
from qtrace.storage.outputs import output_folder
{begin}()
with output_folder(Path("out"), names=("a",), force=True) as folder:
    (folder / "a").write_text("new")
"""


def _write(folder: Path, begin: str) -> int:
    """Replaces the folder ``out`` in a process that begins with a call; returns its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", WRITER.format(begin=begin)]
    return subprocess.run(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL).returncode


def test_a_process_is_killed_right_before_a_change(tmp_path: Path) -> None:
    folders = {}
    for name in ("recorded", "before", "behind"):
        folders[name] = tmp_path / name
        (folders[name] / "out").mkdir(parents=True)
        (folders[name] / "out" / "a").write_text("old")
    assert _write(folders["recorded"], "changes.record_changes") == 0
    made = (folders["recorded"] / "changes.txt").read_text().splitlines()
    exchange = made.index("renameat2")
    assert made[exchange - 1] == "open .out.tmp/a"
    for name, number, content in (("before", exchange, "old"), ("behind", exchange + 1, "new")):
        code = _write(folders[name], f"changes.signal_before([{number}], signal.SIGKILL)")
        assert code == -signal.SIGKILL
        assert (folders[name] / "out" / "a").read_text() == content


def test_turning_points_are_around_new_names() -> None:
    assert turning_points(["open a", "os.rename a", "open b", "open a", "os.rename a", "renameat2"]) == [
        1, 2, 4, 5,
    ]  # fmt: skip
    assert turning_points(["open a", "open b"]) == []


@pytest.mark.slow
def test_a_few_faults_of_every_kind() -> None:
    """At instants that are the same in every run; `python -m benchmarks.faults` kills at random ones, too."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.faults", "--kills", "0", "--rounds", "1"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert process.returncode == 0, process.stderr
    kills = re.search(r"^(\d+) kills and 12 other faults", process.stdout, re.MULTILINE)
    assert kills is not None, process.stdout
    assert int(kills[1]) >= 15, process.stdout
    for state in ("old", "new"):
        assert re.search(rf"^ +\d+ calibrate killed at a change: {state}$", process.stdout, re.MULTILINE)
