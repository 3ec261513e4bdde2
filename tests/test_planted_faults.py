"""The script of planted faults changes one expression at a time, in a copy of the checkout."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts import planted_faults
from scripts.budget import SourceFile

TEXT = '''"""A module."""
import numpy as np

LIMIT = 3 - 1

def fold(values, limit):
    """Doc with a + b."""
    if len(values) < limit and not values.any():
        raise ValueError("a" + f"{limit - 1}")
    return np.rint(values - limit).sum(axis=0)
'''

FILES = {
    "qtrace/__init__.py": "",
    "qtrace/room/fold.py": TEXT,
    "tests/room/test_fold.py": "import numpy as np\nfrom qtrace.room.fold import fold\n\n"
    "def test_fold():\n    assert (fold(np.full((2, 3), 1.5), 0) == 4).all()\n",
    "tests/room/test_other.py": "def test_broken_anyway():\n    assert False\n",
}


def test_each_kind_changes_one_expression_outside_messages():
    faults = [fault for fault, _ in planted_faults.find_faults(SourceFile("qtrace.room.fold", TEXT))]
    assert {fault.kind for fault in faults} == {*planted_faults.KINDS}
    assert len(faults) == 6
    for fault in faults:
        planted = planted_faults.plant(fault, TEXT)
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(TEXT))
        assert fault.after in planted


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout of one module with two tests, of which one fails anyway."""
    for name, text in FILES.items():
        file = tmp_path / "checkout" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "checkout"


def test_seed_chooses_the_same_faults_and_each_once(root: Path):
    chosen = planted_faults.choose(root, 5, 1, set(), None)
    assert chosen == planted_faults.choose(root, 5, 1, {"room"}, root)
    assert {fault.kind for fault in chosen} == {*planted_faults.KINDS}
    assert len({*planted_faults.choose(root, 100, 1, set(), None)}) == 6
    assert planted_faults.choose(root, 5, 1, {"other"}, None) == []


def test_fault_is_found_by_a_test_that_passes_without_it(root: Path, tmp_path: Path):
    suite = planted_faults.Suite(root, tmp_path / "copy", seconds=60)
    source = SourceFile("qtrace.room.fold", TEXT)
    rounding, bound = (
        next(fault for fault, _ in planted_faults.find_faults(source) if fault.kind == kind)
        for kind in ("rounding", "bound")
    )
    assert suite.find(rounding) == "tests/room/test_fold.py::test_fold"
    assert suite.find(bound) == ""  # the other test fails without it, too
    assert (root / "qtrace/room/fold.py").read_text() == TEXT
    assert (tmp_path / "copy/qtrace/room/fold.py").read_text() == TEXT
