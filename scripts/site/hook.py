"""The hook of mkdocs: adds the pages that are written by code, and fills in tables and drawings.

A hand-written page says ``<!-- generated: measured.families -->`` where the result of that function belongs.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore", message="The value of the smallest subnormal")

from mkdocs.structure.files import File  # noqa: E402

from scripts.site import (  # noqa: E402
    api,
    cli,
    composites,
    config,
    errors,
    notebooks,
    ops,
    plugins,
    project,
    recipes,
)

_MARK = re.compile(r"^<!-- generated: (\w+)\.(\w+) -->$", re.MULTILINE)
_cache: dict[str, str] = {}


def generated() -> dict[str, str]:
    """Path of a page below docs/ -> its Markdown, for all pages that are written by code."""
    if not _cache:
        _cache.update({f"reference/api/{path}": text for path, text in api.pages().items()})
        _cache.update(project.root_pages())
        _cache.update(notebooks.pages())
        _cache["reference/cli.md"] = cli.page()
        _cache["reference/composites.md"] = composites.page()
        _cache["reference/config.md"] = config.page()
        _cache["reference/errors.md"] = errors.page()
        _cache["reference/ops.md"] = ops.page()
        _cache["reference/plugins.md"] = plugins.page()
        _cache["reference/recipes.md"] = recipes.page()
    return _cache


def filled(markdown: str) -> str:
    """``markdown`` with the results of the functions that its marks name."""

    def result(match: re.Match[str]) -> str:
        module = importlib.import_module(f"scripts.site.{match[1]}")
        return str(getattr(module, match[2])())

    return _MARK.sub(result, markdown)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are written by code."""
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fills in what a page leaves to code, and turns links to files at the top into links to their pages."""
    path = page.file.src_uri
    if path in generated():
        return markdown
    return filled(project.relink(markdown, f"docs/{path}"))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Puts the stored outputs of notebooks into their pages."""
    return notebooks.with_outputs(html)
