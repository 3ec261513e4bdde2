"""The table: one row for each op, as many columns as fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from qtrace.display import format_table
from qtrace.inspection.explanation._index import Index
from qtrace.preparation.annotation import ExprNote

__all__ = ["op_table"]

_GAP = 2
_COLOURS = {"float": "33", "fused": "2", "carried": "2", "shape": "2"}  # ANSI: yellow, and faint


@dataclass(frozen=True)
class _Column:
    """A column of the table.

    Attributes:
        header: the heading of the column.
        cell: returns the text of the column for an op.
        min_width: the width below which the column is left out, unless its content is narrower.
    """

    header: str
    cell: Callable[[Index, ExprNote], str]
    min_width: int


def _scheme(index: Index, note: ExprNote) -> str:
    """Returns the scheme of the result, or "" inside of a kernel."""
    unrounded = note.state in ("int", "fused") and not note.output and index.is_last(note)
    return "float" if unrounded else note.scheme


def _group(index: Index, note: ExprNote) -> str:
    """Returns whose parameters the result has: "own", the group of another site, or ""."""
    sites = index.at.get(note.name, ())
    own = any(s.name == note.output for s in sites) and len(index.members[note.output]) == 1
    return "own" if own else note.output


def _fused(index: Index, note: ExprNote) -> str:
    return note.into or ", ".join(n.name for n in index.followers.get(note.name, ()))


def _rules(index: Index, note: ExprNote) -> str:
    return ",".join(dict.fromkeys(os.path.basename(origin) for origin in note.matched))


def _milliseconds(index: Index, note: ExprNote) -> str:
    """Returns the predicted times in float and on integers, with "-" where there is no kernel; "" unknown."""
    placement = index.annotation.placement
    if placement is None or note.name not in placement.times:
        return ""
    return " / ".join("-" if time is None else f"{time:.3g}" for time in placement.times[note.name])


def _op_rule(index: Index, note: ExprNote) -> str:
    return note.rule.removeprefix("qtrace/ops/")


# In the order in which they stand, after the names.
_COLUMNS = (
    _Column("op", lambda index, note: note.kind or note.op, 10),
    _Column("role", lambda index, note: note.role, 11),
    _Column("state", lambda index, note: note.state, 7),
    _Column("scheme", _scheme, 12),
    _Column("weight", lambda index, note: index.scheme(note.weight), 12),
    _Column("ms float / int", _milliseconds, 14),
    _Column("group", _group, 12),
    _Column("fused with", _fused, 12),
    _Column("config rules", _rules, 12),
    _Column("reason", lambda index, note: note.reason, 20),
    _Column("op rule", _op_rule, 14),
)
# Which go first when not all fit.
_SPARED = (
    "op rule",
    "role",
    "ms float / int",
    "weight",
    "group",
    "fused with",
    "config rules",
    "reason",
    "scheme",
)


def op_table(index: Index, width: int | None, every: bool, colour: bool) -> str:
    """The table and, below it, what it leaves out.

    Args:
        index: the decisions.
        width: columns to fit into; None for no limit.
        every: show ops on shapes and constants, too.
        colour: set states apart by ANSI colours.
    """
    notes = [n for n in index.annotation.notes if every or n.state != "shape"]
    names = _names([n.name for n in notes], width)
    rest = None if width is None else width - len(names[0]) - _GAP
    filled = {c: [c.cell(index, note) for note in notes] for c in _COLUMNS}
    filled = {c: cells for c, cells in filled.items() if any(cells)}
    spared = _spared(filled, rest)
    shown = {c.header: cells for c, cells in filled.items() if c.header not in spared}
    table = format_table(list(shown), zip(*shown.values(), strict=True), rest).split("\n")
    lines = [f"{name}{' ' * _GAP}{line}".rstrip() for name, line in zip(names, table, strict=True)]
    if colour:
        lines[2:] = [_coloured(line, note.state) for line, note in zip(lines[2:], notes, strict=True)]
    return "\n".join([*lines, *_left_out(len(index.annotation.notes) - len(notes), spared)])


def _names(names: list[str], width: int | None) -> list[str]:
    """The first column, by which people find things: it is cut only where it would take half of a line."""
    lines = format_table(["expr"], [[name] for name in names], None if width is None else max(width // 2, 20))
    first, rule, *others = lines.split("\n")
    return [line.ljust(len(rule)) for line in (first, rule, *others)]


def _spared(filled: dict[_Column, list[str]], width: int | None) -> list[str]:
    """The columns to leave out so that the others stay readable."""
    needs = {
        c.header: max(len(c.header), min(c.min_width, max(map(len, v)))) + _GAP for c, v in filled.items()
    }
    spared: list[str] = []
    for header in _SPARED:
        if width is None or sum(needs.values()) - _GAP <= width:
            break
        if needs.pop(header, None) is not None:
            spared.append(header)
    return spared


def _coloured(line: str, state: str) -> str:
    code = _COLOURS.get(state)
    return line if code is None else f"\x1b[{code}m{line}\x1b[0m"


def _left_out(hidden: int, spared: list[str]) -> list[str]:
    lines = []
    if hidden:
        lines.append(f"({hidden} ops on shapes and constants are not shown; --all shows them)")
    if spared:
        lines.append(f"(no room for: {', '.join(spared)}; a wider terminal or a pipe shows them)")
    return lines
