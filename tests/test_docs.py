"""The code in docs/ runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGES = sorted((Path(__file__).parent.parent / "docs").rglob("*.md"))


@pytest.mark.usefixtures("synchronous")  # pages on training set async_level
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_blocks_run_one_after_the_other(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
