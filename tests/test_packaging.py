"""The promises of the packaging; scripts/check_wheel.py builds, installs and uses the wheel itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import qtrace
from tests.each import each_of

ROOT = Path(__file__).parent.parent
PYPROJECT = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
LINKED = ("observers", "fakequant", "recipes")


def _locked() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def _requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    # What the tests run with; Ray is tried by hand (tests/calibration/test_ray.py says how), torch where it
    # is installed.
    known = project["optional-dependencies"].items()
    extras = {name: requirements for name, requirements in known if name not in ("ray", "torch")}
    groups = [project["dependencies"], *extras.values()]
    return [req for group in groups for req in map(Requirement, group) if req.name != "qtrace"]


@each_of("name", LINKED)
def test_top_level_folder_is_linked_into_the_package(name):
    link = ROOT / "qtrace" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"  # relative, or it breaks in another checkout
    assert not (ROOT / name).is_symlink()


def test_every_folder_of_the_package_is_found_by_setuptools():
    folders = {Path(folder) for folder, _, _ in os.walk(ROOT / "qtrace", followlinks=True)}
    folders = {folder for folder in folders if folder.name != "__pycache__"}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("statement", ["import {0}", "import {0}.base", "from {0} import base"])
def test_ruff_bans_the_bare_import(name, statement):
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        "--select=TID251",
        "--stdin-filename=qtrace/x.py",
        "-",
    ]
    banned = subprocess.run(command, cwd=ROOT, input=statement.format(name), text=True, capture_output=True)
    assert banned.returncode == 1
    assert f"Import qtrace.{name}" in banned.stdout
    qualified = subprocess.run(command, cwd=ROOT, input=statement.format(f"qtrace.{name}"), text=True)
    assert qualified.returncode == 0


@each_of("requirement", _requirements(), ids=str)
def test_lock_has_a_version_that_pyproject_allows(requirement):
    version = _locked()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


def test_lock_names_no_place():
    assert re.findall(r".*(?:/|@|--|\\).*", CONSTRAINTS) == []


def test_version_stands_in_one_place():
    assert qtrace.__version__ == PYPROJECT["project"]["version"]
    assert PYPROJECT["project"]["version"] not in (ROOT / "qtrace/__init__.py").read_text(encoding="utf-8")


def test_package_declares_its_types():
    assert (ROOT / "qtrace/py.typed").is_file()
