"""What one machine has measured, kept for the next time."""

from __future__ import annotations

from pathlib import Path

import pytest

from qtrace.storage.cache import read_cached, write_cached


def test_the_cache_leaves_out_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QTRACE_CACHE", str(tmp_path / "cache"))
    assert read_cached("times", ["a", 1]) is None
    write_cached("times", ["a", 1], {"seconds": 2.0})
    assert read_cached("times", ["a", 1]) == {"seconds": 2.0}
    assert read_cached("times", ["a", 2]) is None
    (file,) = (tmp_path / "cache").iterdir()
    for text in ("", "{}", '{"key": ["b"], "value": 1}'):
        file.write_text(text)
        assert read_cached("times", ["a", 1]) is None
    assert sum("is damaged and is left out" in line for line in caplog.messages) == 3
    monkeypatch.setenv("QTRACE_CACHE", "/proc/nothing")
    write_cached("times", ["a", 1], {})
    assert read_cached("times", ["a", 1]) is None
