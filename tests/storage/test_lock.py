"""The lock on an output folder."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qtrace.errors import QtraceError
from qtrace.storage.outputs import locked, resumable_folder
from tests.each import each_of

_HOLDER = """
import sys, pathlib
from qtrace.storage.outputs import locked
with locked(pathlib.Path(sys.argv[1]), "out"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_and_a_dead_ones_lock_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    wanted = f"out is being written by process {holder.pid} on {socket.gethostname()}, since .*: wait until"
    with pytest.raises(QtraceError, match=wanted), locked(path, "out"):
        pass
    holder.kill()
    holder.communicate()
    assert path.exists()
    notes: list[str] = []
    with locked(path, "out", notes.append):
        assert path.exists()
    (note,) = notes
    assert f"the lock of process {holder.pid} on" in note
    assert "which has ended, was taken over" in note
    assert not path.exists()


def test_a_lock_of_another_host_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": 7, "host": "elsewhere"}))
    with pytest.raises(QtraceError, match=f"process 7 on elsewhere, .* remove {path}"), locked(path, "out"):
        pass
    assert path.exists()


@each_of("content", ["", "{", "[1]", "[" * 4096])
def test_a_damaged_lock_is_a_stale_one(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lock"
    path.write_text(content)
    with locked(path, "out"):
        pass
    assert not path.exists()


def test_a_lock_on_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    out = resumable_folder(tmp_path / "out", names=(), force=False, resume=False, note=print)
    with pytest.raises(QtraceError, match="out cannot be locked: No space left on device"), out:
        pass
    assert list(tmp_path.iterdir()) == []


def test_no_folder_to_lock(tmp_path: Path) -> None:
    with (
        pytest.raises(QtraceError, match="out cannot be locked: No such file"),
        locked(tmp_path / "a/b", "out"),
    ):
        pass
