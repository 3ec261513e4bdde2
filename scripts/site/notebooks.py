"""The notebooks as pages: Markdown cells as they are, code with its stored outputs below it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "pages", "with_outputs"]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
_LINK = re.compile(r"(\]\([\w./-]+)\.ipynb(?=[)#])")
_PLACE = re.compile(r'<div data-output="([\w-]+)/([\w-]+)"></div>')


def pages() -> dict[str, str]:
    """Path of a page below docs/ -> its Markdown, with a place for the outputs of each cell."""
    return {f"notebooks/{path.stem}.md": _page(path) for path in sorted(FOLDER.glob("*.ipynb"))}


def with_outputs(page: str) -> str:
    """Puts the stored outputs into the HTML of a page.

    They are added after Markdown was read, so that nothing in them is taken for Markdown.
    """
    return _PLACE.sub(lambda match: _outputs(FOLDER / f"{match[1]}.ipynb", match[2]), page)


def _cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def _page(path: Path) -> str:
    parts = []
    for cell in _cells(path):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_LINK.sub(r"\1.md", text))
        else:
            parts.append(f"```python\n{text}\n```")
            if cell["outputs"]:
                parts.append(f'<div data-output="{path.stem}/{cell["id"]}"></div>')
    title, *rest = parts
    download = f"*This page is a notebook: [{path.name}]({path.name}).*"
    return "\n\n".join([title, download, *rest]) + "\n"


def _outputs(path: Path, ident: str) -> str:
    (cell,) = (cell for cell in _cells(path) if cell["id"] == ident)
    return f'<div class="cell-output">{"".join(_as_html(cell["outputs"]))}</div>'


def _as_html(outputs: list[dict[str, Any]]) -> Iterator[str]:
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            picture = "".join(data["image/png"]).strip()
            yield f'<img alt="What the cell draws" src="data:image/png;base64,{picture}">'
        elif "text/html" in data:
            yield "".join(data["text/html"])
        else:
            yield f"<pre>{html.escape(''.join(output.get('text', data.get('text/plain', ''))))}</pre>"
