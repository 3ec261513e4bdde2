"""What C libraries print is caught; what others print meanwhile is not."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np
import pytest

from qtrace.cli.console import Console
from qtrace.data.images import decode
from qtrace.errors import DataError
from qtrace.process import caught_lines

JPEG = cv2.imencode(".jpg", np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))[1].tobytes()


def test_lines_are_shared_out(capfd: pytest.CaptureFixture[str]) -> None:
    with caught_lines(("libpng ", "Corrupt ")) as lines:
        os.write(2, b"libpng warning: iCCP\nfrom a thread: \xff\n")
        os.write(2, b"Corrupt JPEG data: bad Huffman code\n")
        print("from Python", file=sys.stderr)
    assert lines == ["libpng warning: iCCP", "Corrupt JPEG data: bad Huffman code"]
    assert sorted(capfd.readouterr().err.splitlines()) == ["from Python", "from a thread: \ufffd"]


def test_stderr_comes_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(MemoryError), caught_lines(("libpng ",)):
        os.write(2, b"libpng error: bad\n")
        raise MemoryError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_images_are_decoded_without_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jpg").write_bytes(JPEG)
    monkeypatch.setattr("qtrace.process._is_open", lambda: False)
    with caught_lines(("",)) as lines:
        os.write(2, b"seen\n")
    assert lines == []
    assert decode(tmp_path / "a.jpg", 3).shape == (64, 64, 3)


def test_no_file_handle_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError(24, "Too many open files")

    (tmp_path / "a.jpg").write_bytes(JPEG)
    monkeypatch.setattr(tempfile, "TemporaryFile", missing)
    with pytest.raises(DataError, match=r"a\.jpg cannot be decoded \(Too many open files\)"):
        decode(tmp_path / "a.jpg", 3)


def test_an_image_with_filled_in_pixels_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    middle = len(JPEG) // 2
    (tmp_path / "a.jpg").write_bytes(JPEG[:middle] + JPEG[middle + 9 :])
    with pytest.raises(DataError, match=r"a\.jpg is a damaged image \([\w ]+\)\.$"):
        decode(tmp_path / "a.jpg", 3)
    assert capfd.readouterr().err == ""


def test_a_progress_bar_has_ended_when_an_error_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        console = Console(forced=True)
        with console.work(), console.bar([1, 2], "verify") as batches:  # type: ignore[arg-type]
            next(iter(batches))
            raise DataError("what is wrong")

    with pytest.raises(DataError):
        fail()
    shown = capsys.readouterr().err
    assert "verify" in shown
    assert shown.endswith("\n")
