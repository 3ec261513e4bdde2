"""Committed pages: links and anchors lead somewhere without a build, and no page installs a stranger."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.each import each_of

ROOT = Path(__file__).parent.parent
_OWN = "tests/test_links.py"


def _tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


def test_no_text_tells_to_install_qtrace_from_the_package_index() -> None:
    """The index has another project of this name, until ours is published there."""
    pattern = re.compile(r"pip install(?: -\S+)* [\"']?qtrace(?![\w/.-])")
    hits = []
    for name in _tracked():
        if name == _OWN or not name.endswith((".py", ".md", ".yaml", ".yml", ".toml", ".j2", "Makefile")):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        hits += [f"{name}: {match[0]}" for match in pattern.finditer(text)]
    assert hits == []


_BUILT = {
    f"docs/reference/{name}.md"
    for name in ("cli", "composites", "config", "errors", "ops", "plugins", "recipes")
} | {f"docs/notebooks/{path.stem}.md" for path in (ROOT / "docs/notebooks").glob("*.ipynb")}
_MARK = "<!-- generated: "


def _without_code(page: Path) -> str:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^---\n.*?\n---\n", "", text, flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    text = _without_code(page)
    anchors = {*re.findall(r"\{#([\w-]+)\}", text), *re.findall(r'id="([\w-]+)"', text)}
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"\{#[\w-]+\}|[`*]", "", heading))
        anchors.add(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", shown).strip().lower()))
    return anchors


@each_of("name", _tracked("*.md"))
def test_relative_links_lead_somewhere_in_a_checkout(name: str) -> None:
    """Pages that code writes, and anchors of tables that code fills in, are in the built site only."""
    page, wrong = ROOT / name, []
    for address in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", _without_code(page))):
        if re.match(r"[a-z]+:", address):
            continue
        file, _, anchor = address.partition("#")
        target = (page.parent / file).resolve() if file else page
        relative = target.relative_to(ROOT).as_posix()
        if relative in _BUILT or relative.startswith("docs/reference/api/"):
            assert not target.exists(), f"{relative} is committed: it is no longer of the built site only"
        elif not target.exists():
            wrong.append(address)
        elif anchor and target.suffix == ".md" and _MARK not in target.read_text(encoding="utf-8"):
            wrong += [address] if anchor not in _anchors(target) else []
    assert wrong == []


def test_the_readme_says_which_pages_need_the_site() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "Only the site has the generated pages" in " ".join(text.split())
