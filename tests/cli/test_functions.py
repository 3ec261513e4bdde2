"""Every command has a function on ``qtrace``, as docs/reference/python-and-commands.md lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import qtrace
from qtrace.cli import program

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "python-and-commands.md"
ROWS = dict(re.findall(r"^\| `([\w -]+)` \| (.+?) \| .*\|$", PAGE.read_text(), re.MULTILINE))


def test_the_page_lists_every_command() -> None:
    assert set(program.group.commands) == {name for name in ROWS if " " not in name}


@pytest.mark.parametrize("command", sorted(name for name in ROWS if " " not in name))
def test_a_command_has_a_function(command: str) -> None:
    name = {"calibrate": "calibrate_to_folder", "import": "from_onnx", "recipes": "load_recipe"}.get(
        command, command
    )
    assert f"`qtrace.{name}(" in ROWS[command]
    assert callable(getattr(qtrace, name))
