"""The code in README.md and docs/ runs: the Python blocks of a page one after the other, in a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qtrace.config import recipe
from tests.each import each_of

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r'^```python(?: title="(?P<file>[\w.]+)")?\n(?P<code>.*?)^```', re.DOTALL | re.MULTILINE)
PAGES = [p for p in sorted((ROOT / "docs").rglob("*.md")) if BLOCK.search(p.read_text(encoding="utf-8"))]
LENGTH = 100


@pytest.fixture(autouse=True)
def default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages run with the default that users meet, unlike the other tests."""
    monkeypatch.setattr(recipe, "DEFAULT_RECIPE", "int8")


def _run(text: str, name: str, folder: Path) -> dict[str, Any]:
    """Runs the blocks of a page in ``folder``; one with a title is a file that later blocks import."""
    names: dict[str, Any] = {"__name__": name}
    for block in BLOCK.finditer(text):
        if block["file"]:
            (folder / block["file"]).write_text(block["code"], encoding="utf-8")
        else:
            exec(compile(block["code"], name, "exec", dont_inherit=True), names)
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty folder as the current one, from which a page's own files can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


def _page(path: Path) -> Any:
    """A page as a parameter: all but the first are slow."""
    name = str(path.relative_to(ROOT / "docs"))
    return pytest.param(path, id=name, marks=[pytest.mark.slow(untimed=True)] * (name != "index.md"))


@pytest.mark.usefixtures("synchronous")  # pages on training set async_level
@pytest.mark.parametrize("page", [_page(path) for path in PAGES])
def test_blocks_run_one_after_the_other(page: Path, folder: Path) -> None:
    _run(page.read_text(encoding="utf-8"), str(page), folder)


def test_the_summary_on_the_page_about_explain_is_what_it_prints(folder: Path) -> None:
    text = (ROOT / "docs" / "guides" / "explain.md").read_text(encoding="utf-8")
    shown = text.split("## The summary\n\n```\n")[1].split("```")[0]
    assert _run(text, "explain.md", folder)["explanation"].summary().strip() == shown.strip()


def test_every_python_block_of_a_page_is_found() -> None:
    """A block with another header would not run, in silence."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        headers = re.findall(r"^ *```(python|py)\b.*$", text, re.MULTILINE)
        assert len(headers) == len(list(BLOCK.finditer(text))), page


GUIDES = [p for p in sorted((ROOT / "docs" / "guides").glob("*.md")) if p.name != "index.md"]


@each_of("page", GUIDES, ids=lambda p: p.stem)
def test_a_guide_opens_with_an_example(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    opening = text.split("\n## ")[0]
    assert text.startswith("# ")
    assert "\n```" in opening


def test_cells_of_tables_are_short() -> None:
    """Two lines at most in a table of two columns."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("|"):
                shown = re.sub(r"\]\([^)]*\)", "]", line)  # a link's address is not shown
                assert max(map(len, shown.strip("|").split(" | "))) <= 120, f"{page}: {line}"


@pytest.mark.usefixtures("synchronous")
def test_readme_runs(folder: Path) -> None:
    names = _run((ROOT / "README.md").read_text(encoding="utf-8"), "README.md", folder)
    assert names["report"].passed


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LENGTH
    blocks = [b["code"].strip().splitlines() for b in BLOCK.finditer(text)]
    assert sum(map(len, blocks)) <= 16
    assert len(_commands(ROOT / "docs" / "index.md").splitlines()) <= 9


def _commands(page: Path) -> str:
    """Returns the commands of a page that has one block of them."""
    (block,) = re.findall(
        r"^```\n(qtrace .*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return block


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_first_commands_exist(page: str) -> None:
    """Every option of a command that a newcomer reads first is one of the command's."""
    from qtrace.cli import group

    block = _commands(ROOT / page)
    lines = re.findall(r"^qtrace (\S+)(.*?)(?:#.*)?$", block, re.MULTILINE)
    assert len(lines) == len(block.splitlines())
    for name, rest in lines:
        known = {flag for option in group.commands[name].params for flag in option.opts}
        assert set(re.findall(r"(?<= )--?[a-z][\w-]*", rest)) <= known, (name, rest)


_MODELS = """
import megengine as mge
import megengine.functional as F
import megengine.module as M


class Block(M.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = M.Conv2d(4, 4, 3, padding=1), M.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)) + x)


class Net(M.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layer1, self.fc = M.Conv2d(3, 4, 16, stride=16), M.Sequential(Block()), M.Linear(4, 5)

    def forward(self, x):
        return self.fc(F.mean(self.layer1(F.relu(self.stem(x))), (2, 3)))


def resnet18():
    mge.random.seed(0)
    return Net()
"""


@pytest.mark.slow
def test_commands_of_the_first_page_run(folder: Path) -> None:
    import cv2
    import numpy as np

    (folder / "models.py").write_text(_MODELS, encoding="utf-8")
    (folder / "mine.yaml").write_text("schema: qtrace/1\nimports: [backend/generic_w4a4, resnet18]\n")
    for number, name in enumerate(["images", "new"]):
        (folder / name).mkdir()
        for index in range(24):
            pixels = np.random.default_rng([number, index]).integers(0, 256, (256, 256, 3), np.uint8)
            cv2.imwrite(str(folder / name / f"{index}.png"), cv2.GaussianBlur(pixels, (31, 31), 0))
    block = _commands(ROOT / "docs" / "index.md")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for line in block.splitlines():
        words = line.partition("#")[0].split()
        command = [sys.executable, "-m", *words]
        run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        assert run.returncode == 0, (line, run.stderr[-2000:])
    left = {path.name for path in folder.iterdir()}
    assert {"float.mge", "int8", "errors.html", "int8-tuned", "mixed.yaml", "model.onnx"} <= left


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_figures_of_the_readme_are_the_stored_ones() -> None:
    from scripts.site.measured import figures

    assert figures() in (ROOT / "README.md").read_text(encoding="utf-8")
