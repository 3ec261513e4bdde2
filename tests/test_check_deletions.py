"""scripts/check_deletions.py on small repositories of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.check_deletions import problems

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "check_deletions.py"
TESTS = "def test_first():\n    assert 1\n\n\ndef test_second():\n    assert 2\n"
MODULE = "".join(f"VALUE_{i} = {i}\n" for i in range(20))


def _git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *who, *arguments], check=True, capture_output=True)


def _commit(root: Path, message: str, **files: str | None) -> None:
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
    _git(root, "add", "-A")
    _git(root, "commit", "-q", "-m", message)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    root.mkdir()
    _git(root, "init", "-q")
    _commit(root, "Before the rule", old__gone=MODULE)
    _commit(root, "Nobody names it, but there was no rule", old__gone=None)
    script = {"scripts__check_deletions": SCRIPT.read_text(encoding="utf-8")}
    _commit(root, "The rule", **script, pkg__module=MODULE, tests__test_all=TESTS)
    return root


def test_deletions_that_are_not_named(repository: Path) -> None:
    _commit(repository, "Faster", pkg__module=None, tests__test_all=TESTS[: TESTS.index("\n\ndef")])
    first, second = sorted(problems(repository), key=len)
    assert "deletes the module pkg/module.py and does not say so: name module in its message" in first
    assert "deletes the test test_second of tests/test_all.py" in second
    process = subprocess.run(
        [sys.executable, str(repository / "scripts/check_deletions.py")], capture_output=True, text=True
    )
    assert process.returncode == 1
    assert process.stderr.count("error: ") == 2


def test_named_deletions_moves_and_new_names_pass(repository: Path) -> None:
    _commit(repository, "test_second moves", tests__test_all=TESTS[: TESTS.index("\n\ndef")])
    _commit(repository, "A test gets another name", tests__test_all="def test_one():\n    assert 1\n")
    _commit(repository, "A move", pkg__module=None, pkg__other=MODULE)
    _commit(repository, "other is not needed", pkg__other=None)
    assert problems(repository) == []


def test_a_shallow_clone_and_no_repository(repository: Path, tmp_path: Path) -> None:
    _commit(repository, "Faster", pkg__module=None)
    _git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    assert problems(tmp_path / "shallow") == []
    alone = tmp_path / "alone" / "scripts"
    alone.mkdir(parents=True)
    shutil.copy(SCRIPT, alone)
    process = subprocess.run([sys.executable, str(alone / SCRIPT.name)], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
