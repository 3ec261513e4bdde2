"""Files appear whole or not at all, several of them together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qtrace.storage.files import claim, kind_of, replacing, temporary_folder


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_change_when_the_block_ends(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with replacing(tmp_path / "a", tmp_path / "b") as (a, b):
        a.write(b"new")
        b.write(b"beside")
        assert (tmp_path / "a").read_bytes() == b"old"
        assert not (tmp_path / "b").exists()
    assert _contents(tmp_path) == {"a": b"new", "b": b"beside"}


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(TypeError), replacing(tmp_path / "a", tmp_path / "b") as (a, _):
        a.writelines([b"new", None])  # type: ignore[list-item]
    assert _contents(tmp_path) == {"a": b"old"}


def test_no_file_is_renamed_before_all_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        steps.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name.removeprefix(".").partition(".")[0])
        fsync(handle)

    def renamed(old: Path, new: Path) -> None:
        steps.append(f"{new.name} renamed")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    with replacing(tmp_path / "a", tmp_path / "b"):
        pass
    assert steps == ["a", "b", "a renamed", "b renamed", tmp_path.name]


def test_a_file_that_cannot_be_flushed_is_not_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"), replacing(tmp_path / "a") as (a,):
        a.write(b"new")
    assert _contents(tmp_path) == {"a": b"old"}


def test_what_killed_processes_left_is_swept_and_what_is_written_is_not(tmp_path: Path) -> None:
    (tmp_path / ".a.00000000.tmp").write_bytes(b"left")
    (tmp_path / ".b.00000000.tmp").write_bytes(b"of another")
    with replacing(tmp_path / "a") as (first,):
        first.write(b"first")
        with replacing(tmp_path / "a") as (second,):
            second.write(b"second")
    assert _contents(tmp_path) == {"a": b"first", ".b.00000000.tmp": b"of another"}


def test_the_kind_of_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    kinds = [kind_of(tmp_path / name) for name in ("file", "nothing", "folder", "pipe")]
    assert kinds == ["", "", "a folder", "a device or a pipe"]
    assert kind_of(tmp_path / "pipe", "not a regular file") == "not a regular file"


def test_a_temporary_folder_is_removed_and_so_is_that_of_a_killed_process(tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    folder, lock = claim(target, Path.mkdir)
    os.close(lock)  # as the system does for a killed process
    with temporary_folder(target) as own:
        (own / "twin.onnx").write_bytes(b"1")
        assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_claim_gives_up_where_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not keep a temporary file"):
        claim(tmp_path / "net.onnx", lambda path: None)
