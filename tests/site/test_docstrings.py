"""Docstrings become Markdown."""

from __future__ import annotations

from scripts.site.docstrings import Item, parse, render, summary

TEXT = """Does a thing
with two lines.

More about it::

    a = b

and after.

Args:
    first: a number, which goes
        on here.
    *rest: others.
    low, high: bounds.

Returns:
    A number.

Raises:
    ValueError: when it is
        wrong.

Last words.
"""


def test_sections_and_items() -> None:
    sections = parse(TEXT)
    assert [s.title for s in sections] == ["", "Args", "Returns", "Raises", ""]
    assert sections[1].items[0] == Item("first", "a number, which goes on here.")
    assert [item.name for item in sections[1].items] == ["first", "*rest", "low, high"]
    assert sections[2].text == "A number."
    assert sections[4].text == "Last words."


def test_markdown() -> None:
    text = render(TEXT)
    assert "More about it:\n\n```text\n    a = b\n```\n\nand after." in text
    assert "**Arguments**\n\n- `first`: a number" in text
    assert "- `low`, `high`: bounds." in text
    assert "**Returns**: A number." in text
    assert summary(TEXT) == "Does a thing with two lines."
    assert render(None) == ""
