"""The page on graph tools names tests that exist, and names of qtrace that can be imported."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/graph-tools.md").read_text(encoding="utf-8")
ROWS = [
    line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| what"))
]


def test_every_item_has_a_test_or_is_not_there() -> None:
    assert len(ROWS) > 30
    for row in ROWS:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert tests or "| not there |" in row, row
        for file, name in tests:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row


def test_every_name_of_qtrace_can_be_imported() -> None:
    names = re.findall(r"`(qtrace\.[\w.]+)`", PAGE)
    assert len(names) > 10
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name
