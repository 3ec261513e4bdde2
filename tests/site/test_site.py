"""The site builds with every warning an error, loads nothing from elsewhere, and refuses what is broken."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def _build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    run = _build(ROOT, folder)
    assert run.returncode == 0, run.stderr
    assert "WARNING" not in run.stderr
    return folder


def test_every_page_of_the_navigation_is_there(site: Path) -> None:
    def paths(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [path for value in values for path in paths(value)]

    pages = paths(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(pages) > 50
    for path in pages:
        page = path.removesuffix(".md").removesuffix("index")
        assert (site / page / "index.html").is_file(), path


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=[\"']?(https?:[^\"' >]+)", text)
        assert [url for url in loaded if "127.0.0.1" not in url] == [], page


def test_site_has_no_unfilled_marks(site: Path) -> None:
    assert not any("<!-- generated" in page.read_text(encoding="utf-8") for page in site.rglob("*.html"))


def test_links_inside_of_drawings_lead_somewhere(site: Path) -> None:
    page = site / "background" / "stages" / "index.html"
    links = re.findall(
        r'<a href="(\.\./\.\./reference/api/[^"#]+)#([\w.]+)"', page.read_text(encoding="utf-8")
    )
    assert len(links) >= 6
    for path, anchor in links:
        target = (page.parent / path / "index.html").resolve()
        assert f'id="{anchor}"' in target.read_text(encoding="utf-8")


def test_search_finds_the_words_of_a_message(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "calibration data holds no batches" in index


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings = settings.replace("scripts/site/hook.py", str(ROOT / "scripts/site/hook.py"))
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    page = tmp_path / "docs" / "start" / "demo.md"
    links = "[page](gone.md) and [section](install.md#absent)"
    page.write_text(f"{page.read_text(encoding='utf-8')}\n{links}\n", encoding="utf-8")
    run = _build(tmp_path, tmp_path / "site")
    assert run.returncode != 0
    assert "gone.md" in run.stderr  # a page that does not exist
    assert "install.md#absent" in run.stderr  # a heading that does not exist
