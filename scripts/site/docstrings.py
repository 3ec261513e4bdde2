"""Docstrings in Google's style as Markdown: prose, then one list for each section."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

__all__ = ["Item", "Section", "parse", "render", "render_section", "summary"]

# Sections of named items, and sections of prose.
_ITEMS = {"Args": "Arguments", "Attributes": "Attributes", "Options": "Options", "Raises": "Raises"}
_PROSE = {"Returns": "Returns", "Yields": "Yields"}
_HEADING = re.compile(rf"({'|'.join((*_ITEMS, *_PROSE, 'Example'))}):")
_ITEM = re.compile(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*)(?: \([^)]*\))?:(?: |$)(.*)")


@dataclass(frozen=True)
class Item:
    """One entry of a section: a name (several, if one text serves them) and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Section:
    """A part of a docstring.

    ``title`` is "" for prose outside of sections. ``items`` are the entries of a section such as Args;
    ``text`` is the prose of any other.
    """

    title: str
    text: str = ""
    items: tuple[Item, ...] = ()


def parse(docstring: str | None) -> list[Section]:
    """Splits a docstring into prose and sections, in their order."""
    sections, title, block = [], "", list[str]()
    for line in [*inspect.cleandoc(docstring or "").splitlines(), None]:
        heading = _HEADING.fullmatch(line) if line is not None else None
        ends = line is None or heading is not None or (title and line and not line.startswith(" "))
        if not ends:
            assert line is not None
            block.append(line)
            continue
        if any(block):
            sections.append(_section(title, block))
        title, block = (heading[1], []) if heading else ("", [line or ""])
    return sections


def summary(docstring: str | None) -> str:
    """The first paragraph, on one line."""
    return " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())


def render(docstring: str | None) -> str:
    """A docstring as Markdown."""
    return "\n\n".join(render_section(section) for section in parse(docstring))


def _section(title: str, block: list[str]) -> Section:
    text = inspect.cleandoc("\n".join(["", *block]))
    if title not in _ITEMS:
        return Section(title, text)
    items: list[Item] = []
    for line in text.splitlines():
        start = _ITEM.fullmatch(line)
        if start and not line.startswith(" "):
            items.append(Item(start[1], start[2]))
        elif items:
            items[-1] = Item(items[-1].name, f"{items[-1].text} {line.strip()}".strip())
    return Section(title, items=tuple(items))


def render_section(section: Section) -> str:
    """A section as Markdown."""
    if not section.title:
        return _literal_blocks(section.text)
    if section.title == "Example":
        return f"**Example**\n\n{section.text}"
    if section.title in _PROSE:
        return f"**{_PROSE[section.title]}**: {' '.join(section.text.split())}"
    lines = [f"- {_names(item.name)}: {item.text}" for item in section.items]
    return "\n".join([f"**{_ITEMS[section.title]}**", "", *lines])


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _literal_blocks(text: str) -> str:
    """``text`` with what reStructuredText calls literal blocks (``::`` and an indent) as fenced ones."""
    lines, inside = [], False
    for line in text.splitlines():
        if inside and line and not line.startswith(" "):
            while lines and not lines[-1]:
                lines.pop()
            lines += ["```", ""]
            inside = False
        if not inside and line.endswith("::"):
            lines += [line[:-1], "", "```text"]
            inside = True
            continue
        if inside and not line and lines[-1] == "```text":
            continue
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)
