"""Checks that a commit which deletes a module or a test names it in its message; ``make lint`` runs it.

A change made on an old copy of a file undoes what others committed meanwhile, and nothing else shows it. The
check covers the commits of the last weeks that build on the one that added this script. It needs no history:
in a shallow clone it covers what is there, and without git or a repository it does nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_COMMITS = 60
_TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
_SELF = "scripts/check_deletions.py"


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "core.quotepath=off", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
    return process.stdout


def problems(root: Path) -> list[str]:
    """Returns one sentence for each deletion that its commit does not name.

    Args:
        root: the checkout.
    """
    sentences: list[str] = []
    for commit in _commits(root):
        message = _git(root, "show", "-s", "--format=%B", commit)
        for name, description in _deleted(root, commit):
            if name not in message:
                sentences.append(
                    f"{commit[:7]} deletes {description} and does not say so: name {name} in its message."
                )
    return sentences


def _commits(root: Path) -> list[str]:
    """The latest commits that have one parent here and descend from the commit that added this script."""
    added = _git(root, "log", "--diff-filter=A", "--format=%H", "--", _SELF).split()
    if not added:
        return []
    span = ["--ancestry-path", f"{added[-1]}..HEAD"]
    return _git(root, "rev-list", "--no-merges", f"--max-count={_COMMITS}", *span).split()


def _deleted(root: Path, commit: str) -> list[tuple[str, str]]:
    """The modules and tests that ``commit`` deletes: name, and what it is in words. A move is no deletion."""
    rows = _git(root, "diff-tree", "-r", "-M40%", "--no-commit-id", "--name-status", commit, "--", "*.py")
    deleted: list[tuple[str, str]] = []
    for row in rows.splitlines():
        status, *paths = row.split("\t")
        before = _tests(root, f"{commit}~1:{paths[0]}") if status[0] != "A" else set()
        after = _tests(root, f"{commit}:{paths[-1]}") if status[0] != "D" else set()
        if status[0] == "D":
            deleted.append((Path(paths[0]).stem, f"the module {paths[0]}"))
        elif len(after - before) < len(before - after):  # else they got other names
            deleted += [(name, f"the test {name} of {paths[0]}") for name in sorted(before - after)]
    moved = {
        name
        for name, description in deleted
        if description.startswith("the test") and _exists(root, commit, name)
    }
    return [(name, description) for name, description in deleted if name not in moved]


def _tests(root: Path, file: str) -> set[str]:
    return set(_TEST.findall(_git(root, "show", file))) if "/test_" in file else set()


def _exists(root: Path, commit: str, name: str) -> bool:
    command = ["git", "-C", str(root), "grep", "-q", "-w", f"def {name}", commit, "--", "*.py"]
    return subprocess.run(command, capture_output=True).returncode == 0


def main() -> int:
    """Prints what is wrong; returns 1 if there is something."""
    root = Path(__file__).resolve().parent.parent
    try:
        sentences = problems(root)
    except (OSError, subprocess.CalledProcessError):  # no git, no repository, or commits that are not here
        print("check_deletions: no history here, nothing checked")
        return 0
    for sentence in sentences:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
