"""The script of planted faults changes one expression at a time, in a copy of the checkout."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from coverage import CoverageData

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
        planted, lines = planted_faults.plant(fault, TEXT)
        assert fault.after in "\n".join(planted.splitlines()[line - 1] for line in lines)
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(TEXT))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout of one module with two tests, of which one fails anyway."""
    for name, text in FILES.items():
        file = tmp_path / "checkout" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "checkout"


def test_seed_chooses_the_same_faults_and_each_once(root: Path):
    faults = planted_faults.read_faults(root)
    chosen = planted_faults.choose(faults, 5, 1)
    assert chosen == planted_faults.choose(faults, 5, 1)
    assert {fault.kind for fault in chosen} == {*planted_faults.KINDS}
    assert len({*planted_faults.choose(faults, 100, 1)}) == 6
    assert planted_faults.choose([], 5, 1) == []


def test_faults_of_a_function_that_moved_are_the_same(root: Path):
    before = planted_faults.read_faults(root)
    (root / "qtrace/room/fold.py").rename(root / "qtrace/moved.py")
    text = TEXT.replace("Doc with", "Documented with").replace("LIMIT = 3 - 1", "\n")
    (root / "qtrace/moved.py").write_text(text)
    assert planted_faults.read_faults(root) == before
    (root / "qtrace/moved.py").write_text(text.replace("values.any", "values.all"))
    assert not {*planted_faults.read_faults(root)} & {*before}


def test_tests_of_a_fault_run_its_lines_the_near_and_the_small_first(tmp_path: Path):
    data = CoverageData(str(tmp_path / "data"))
    for test, files in {"": "a", "far::whole": "abc", "far::part": "ab", "near::whole": "abc"}.items():
        data.set_context(f"{test}|run" if test else test)
        data.add_lines({f"/root/{file}.py": [3, 4] if test else [2, 3] for file in files})
    data.close()
    contexts = planted_faults.Contexts(tmp_path / "data")
    tests = ["near::whole", "far::part", "far::whole"]
    assert contexts.choose_tests("a.py", range(3, 4), ["near"]) == tests
    assert contexts.choose_tests("c.py", range(3, 5), []) == ["far::whole", "near::whole"]
    assert contexts.choose_tests("a.py", range(2, 3), ["near"]) == ["near"]  # when it is imported
    assert contexts.choose_tests("a.py", range(5, 6), ["near"]) == []


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
