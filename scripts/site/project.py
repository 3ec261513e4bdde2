"""Files at the top of the repository as pages, and links to them from the pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

__all__ = ["ROOT_PAGES", "relink", "root_pages"]

ROOT = Path(__file__).resolve().parents[2]
# File at the top -> page of the site.
ROOT_PAGES = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
}
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def root_pages() -> dict[str, str]:
    """Path of a page -> the text of the file at the top, with its links."""
    return {
        page: relink((ROOT / file).read_text(encoding="utf-8"), file, page)
        for file, page in ROOT_PAGES.items()
    }


def relink(text: str, file: str, page: str | None = None) -> str:
    """``text`` with links to files at the top as links to their pages.

    Args:
        text: Markdown.
        file: the path of the text, relative to the top of the repository; its links begin there.
        page: the path of the page in the site; None for the same path below docs/.
    """
    folder = posixpath.dirname(page if page is not None else file.removeprefix("docs/"))

    def change(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), match[2]))
        if target in ROOT_PAGES:
            target = f"docs/{ROOT_PAGES[target]}"
        elif page is None or not target.startswith("docs/"):
            return match[0]
        moved = posixpath.relpath(target.removeprefix("docs/"), folder or ".")
        return f"{match[1]}{moved}{match[3] or ''}{match[4]}"

    return _LINK.sub(change, text)
