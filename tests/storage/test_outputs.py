"""Outputs that appear whole or not at all."""

from __future__ import annotations

import os
import signal

import pytest

from qtrace.errors import QtraceError
from qtrace.process import undisturbed
from qtrace.storage import files, outputs


def test_signals_wait_until_cleanup_ends():
    before = signal.getsignal(signal.SIGINT)
    with undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_missing_folders_are_made_and_taken_back(tmp_path):
    with pytest.raises(ZeroDivisionError), outputs.output_file(tmp_path / "a" / "b" / "c.txt"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    with outputs.output_file(tmp_path / "a" / "b" / "c.txt") as partial:
        partial.write_text("whole")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "whole"


def test_a_folder_that_cannot_be_replaced_is_put_back(tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    (target / "a").write_text("old")
    real, calls = os.rename, []

    def rename(source, to):
        calls.append(to)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(source, to)

    monkeypatch.setattr(outputs.os, "rename", rename)
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)  # as on other systems
    with (
        pytest.raises(QtraceError, match="cannot be replaced: No space left"),
        outputs.output_folder(target, names=("a",), force=True) as folder,
    ):
        (folder / "a").write_text("new")
    assert (target / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_an_error_names_the_output_and_no_temporary_file(tmp_path):
    with pytest.raises(QtraceError) as caught, outputs.output_file(tmp_path / "m.onnx") as partial:
        raise QtraceError(f"onnxruntime cannot run {partial} with {partial.parent / 'weights'}.")
    assert str(caught.value) == f"onnxruntime cannot run {tmp_path / 'm.onnx'} with {tmp_path / 'weights'}."
    with (
        pytest.raises(QtraceError) as caught,
        outputs.output_folder(tmp_path / "q", names=("a",), force=True) as folder,
    ):
        raise QtraceError(f"{folder / 'a'} is wrong: repair it.")
    assert str(caught.value) == f"{tmp_path / 'q' / 'a'} is wrong: repair it."
    with (
        pytest.raises(QtraceError, match=r"^float\.onnx is wrong"),
        files.temporary_folder(tmp_path / "x") as folder,
    ):
        raise QtraceError(f"{folder / 'float.onnx'} is wrong: repair it.")
