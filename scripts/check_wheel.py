#!/usr/bin/env python3
"""Prove that what an installation of the wheel gives works, far from this checkout.

Builds the sdist and, from the sdist, the wheel; checks what is in them; installs the wheel without extras
into a fresh virtual environment; and uses it from another directory. `make wheel-check` runs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKED = {"observers", "fakequant", "recipes"}
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "demo-out", "*.egg-info", "__pycache__")

USE = """
import importlib.util, pathlib, sys
import qtrace
from qtrace.config.recipe import recipe_names

home = pathlib.Path(qtrace.__file__).parent
assert home.is_relative_to(sys.prefix), f"imported {home}, not the installed qtrace"
for name in ("observers", "fakequant", "recipes"):
    assert importlib.util.find_spec(name) is None, f"a top-level {name} was installed"
    assert importlib.util.find_spec(f"qtrace.{name}"), f"qtrace.{name} is missing"
recipes = recipe_names()
assert {"resnet", "backend/onnxruntime"} <= set(recipes), f"recipes are missing; installed: {recipes}"
for name in recipes:
    qtrace.load_recipe(name)
print("qtrace", qtrace.__version__, "with the recipes", ", ".join(recipes))
"""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="qtrace-wheel-") as name:
        work = Path(name).resolve()
        # Build from a copy: an old build/ or egg-info in the checkout would leak into the result.
        shutil.copytree(ROOT, work / "source", symlinks=True, ignore=NOT_SOURCE)
        run(sys.executable, "-m", "build", "--outdir", work / "dist", work / "source", cwd=work)
        (sdist,) = (work / "dist").glob("*.tar.gz")
        (wheel,) = (work / "dist").glob("*.whl")
        problems = check_sdist(sdist) + check_wheel(wheel)
        if problems:
            print(*problems, sep="\n", file=sys.stderr)
            return 1

        run(sys.executable, "-m", "venv", work / "venv", cwd=work)
        python = work / "venv/bin/python"
        run(python, "-m", "pip", "install", wheel, cwd=work)
        run(python, "-m", "pip", "check", cwd=work)
        elsewhere = work / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "use.py").write_text(USE)
        run(python, "use.py", cwd=elsewhere)
        run(work / "venv/bin/qtrace", "--help", cwd=elsewhere)
    print(f"{wheel.name}: ok")
    return 0


def shipped_files() -> set[str]:
    """Every file below qtrace/, through the links, as the wheel should name it."""
    names = set()
    for folder, subfolders, files in os.walk(ROOT / "qtrace", followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        names |= {(Path(folder) / name).relative_to(ROOT).as_posix() for name in files if name[0] != "."}
    return names


def check_sdist(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members if not member.isdir()}
    problems = [f"sdist: {member.name} is a link" for member in members if member.issym() or member.islnk()]
    problems += [f"sdist: {name} is outside qtrace/" for name in names if name.split("/")[0] in LINKED]
    problems += [f"sdist: {name} is missing" for name in (shipped_files() | {"LICENSE"}) - names]
    return sorted(problems)


def check_wheel(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = shipped_files()
    problems = [f"wheel: {name} should not be there" for name in names - expected]
    problems += [
        f"wheel: {name} is missing (no __init__.py beside it, or not in [tool.setuptools.package-data]?)"
        for name in expected - names
    ]
    return sorted(problems)


def run(*command: str | Path, cwd: Path) -> None:
    print("+", *command, flush=True)
    # Nothing of the caller's may help or hinder. The lock comes by environment, so that it holds in pip's
    # build environments too, and as a URL, because pip would split a path at a space.
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env["PIP_CONSTRAINT"] = (ROOT / "constraints.txt").as_uri()
    subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=True)


if __name__ == "__main__":
    sys.exit(main())
