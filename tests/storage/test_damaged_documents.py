"""JSON files of qtrace's own that are damaged: each reader ends in a sentence, or goes on without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qtrace.costs import CostTable
from qtrace.errors import QtraceError
from qtrace.extras import device
from qtrace.extras.diff import models
from qtrace.extras.tune import trials as folder
from qtrace.extras.tune.trials import TrialLog
from qtrace.storage.files import parse_document
from tests.each import each_of

DAMAGES = ("[" * 100_000, '{"a":' * 100_000, "[1]", "{", "\xff", "null")
READERS: dict[str, Callable[[Path], Any]] = {
    "search.json": lambda path: folder._compare(path.parent, {"data": "x"}),
    "trials.jsonl": TrialLog,
    "verdict.json": lambda path: models._read_verdict(path.parent),
    "table.json": CostTable.read,
}


@each_of("text", DAMAGES)
def test_only_an_object_is_a_document(text: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        parse_document(text.encode("latin-1"))
    assert len(str(caught.value)) < 200


@each_of("text", DAMAGES)
@each_of("name", READERS)
def test_a_damaged_file_is_one_sentence(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1") + b"\n\n")
    with pytest.raises(QtraceError, match=name):
        READERS[name](path)


@each_of("text", DAMAGES)
def test_a_damaged_index_is_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(text.encode("latin-1"))
    assert not device._holds_vectors(tmp_path)
