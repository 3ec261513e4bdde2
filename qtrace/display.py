"""How results and progress show themselves: tables as text, a short ``repr``, HTML in notebooks, bars."""

from __future__ import annotations

import html
import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

GAP = "  "  # between columns
_ELLIPSIS = "…"
_MIN_COLUMN_WIDTH = 6  # in characters, even if the table is too wide then
_NUMBER = re.compile(r"[-+]?[\d.,_]+(e[-+]?\d+)?\s?%?\Z")
_RULE = re.compile(r"-+( +-+)* *")
_MAX_LINES, _TAIL = 36, 12  # of a repr: a screen, and its end
_MAX_LINE = 400
_MAX_WIDTH = 160
_TABLE_STYLE = "border-collapse:collapse;font-size:90%"
_CELL_STYLE = "padding:1px 8px"
_SCROLL_STYLE = "max-height:32em;overflow:auto"


class Displayed:
    """A result that shows itself: at most a screen as ``repr``, all of it as HTML in a notebook.

    A dataclass that is one is declared with ``repr=False``. It has a method ``table``, with or without
    ``max_width``, or defines `_text`.
    """

    def _text(self, max_width: int | None) -> str:
        """Returns the whole result as text.

        Args:
            max_width: the largest width in characters; None for no limit.
        """
        table: Any = self.table  # type: ignore[attr-defined]
        sized = "max_width" in inspect.signature(table).parameters
        return str(table(max_width=max_width) if sized else table())

    def _figure(self) -> str:
        """Returns a picture for a notebook, as HTML; "" for none."""
        return ""

    def __repr__(self) -> str:
        lines = self._text(_MAX_WIDTH).splitlines()
        if len(lines) > _MAX_LINES:
            # The end has the totals: it stays, and the middle goes.
            head, tail = lines[: _MAX_LINES - _TAIL - 1], lines[-_TAIL:]
            lines = [*head, f"{_ELLIPSIS} {len(lines) - len(head) - len(tail)} more lines", *tail]
        return "\n".join(line if len(line) <= _MAX_LINE else line[:_MAX_LINE] + _ELLIPSIS for line in lines)

    def _repr_html_(self) -> str:
        """Returns the result for a notebook: its picture, its tables and its lines."""
        blocks = "".join(_blocks_as_html(self._text(None)))
        return f'<div style="{_SCROLL_STYLE}">{self._figure()}{blocks}</div>'


def _blocks_as_html(text: str) -> Iterator[str]:
    """Yields the tables of `format_table` as HTML tables, and what is between them as it is."""
    lines = text.splitlines()
    plain: list[str] = []
    index = 0
    while index < len(lines):
        if index + 1 < len(lines) and _RULE.fullmatch(lines[index + 1]) and lines[index].strip():
            yield from _plain(plain)
            plain = []
            end = index + 2
            spans = [match.span() for match in re.finditer("-+", lines[index + 1])]
            while end < len(lines) and _is_row(lines[end], spans):
                end += 1
            yield _as_html(lines[index], spans, lines[index + 2 : end])
            index = end
        else:
            plain.append(lines[index])
            index += 1
    yield from _plain(plain)


def _is_row(line: str, columns: Sequence[tuple[int, int]]) -> bool:
    """Whether a line has nothing between the columns; a sentence after a table has."""
    gaps = itertools.pairwise(columns)
    return bool(line.strip()) and not any(line[end:start].strip() for (_, end), (start, _) in gaps)


def _plain(lines: Sequence[str]) -> Iterator[str]:
    if text := "\n".join(lines).strip("\n"):
        yield f'<pre style="white-space:pre-wrap">{html.escape(text)}</pre>'


def _as_html(header: str, spans: Sequence[tuple[int, int]], rows: Sequence[str]) -> str:
    """Returns a table whose columns begin and end at ``spans``."""
    last = len(spans) - 1

    def cells(line: str, tag: str) -> str:
        parts = [line[a : None if i == last else b].strip() for i, (a, b) in enumerate(spans)]
        sides = ["right" if _NUMBER.match(part) else "left" for part in parts]
        return "".join(
            f'<{tag} style="text-align:{side};{_CELL_STYLE}">{html.escape(part)}</{tag}>'
            for part, side in zip(parts, sides, strict=True)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{cells(header, 'th')}</tr></thead>"
    return f'<table style="{_TABLE_STYLE}">{head}<tbody>{body}</tbody></table>'


def megabytes(count: float) -> float:
    """Returns a number of bytes in MB of 2**20 bytes."""
    return count / 2**20


def format_bytes(count: int) -> str:
    """Returns a number of bytes in MB of 2**20 bytes, or in kB below one."""
    return f"{megabytes(count):.2f} MB" if megabytes(count) >= 1 else f"{count / 2**10:.1f} kB"


def format_table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], max_width: int | None = 140
) -> str:
    """Formats a table with a header, a rule and one line for each row; aligns numbers to the right.

    Args:
        headers: the names of the columns.
        rows: the cells, converted by ``str``; line breaks in them become spaces.
        max_width: largest width in characters, reached by shortening the widest cells with an ellipsis; None
            for no limit. A table of very many columns stays wider than unreadable.

    Raises:
        ValueError: when a row does not have one cell for each header.
    """
    cells = [[" ".join(str(cell).split()) for cell in row] for row in rows]
    for index, row in enumerate(cells):
        if len(row) != len(headers):
            raise ValueError(f"row {index} has {len(row)} cells, but the table has {len(headers)} columns.")
    columns = list(zip(headers, *cells, strict=True))
    numeric = [any(column[1:]) and all(not c or _NUMBER.match(c) for c in column[1:]) for column in columns]
    widths = _fit([max(map(len, column)) for column in columns], max_width)

    def line(row: Sequence[str]) -> str:
        parts = [_shorten(cell, width) for cell, width in zip(row, widths, strict=True)]
        aligned = [p.rjust(w) if n else p.ljust(w) for p, w, n in zip(parts, widths, numeric, strict=True)]
        return GAP.join(aligned).rstrip()

    return "\n".join([line(headers), GAP.join("-" * width for width in widths), *map(line, cells)])


def _fit(widths: list[int], max_width: int | None) -> list[int]:
    """Lowers the widest of ``widths`` to one common limit such that the line fits."""
    if max_width is None:
        return widths
    room = max_width - len(GAP) * (len(widths) - 1)
    remaining = len(widths)
    limit = max(widths, default=0)
    for width in sorted(widths):  # narrow columns keep their width, the others share the rest
        limit = room // remaining
        if width > limit:
            break
        room -= width
        remaining -= 1
    else:
        return widths
    limit = max(limit, _MIN_COLUMN_WIDTH)
    spare = max(room - limit * remaining, 0)
    result = []
    for width in widths:
        extra = 1 if width > limit and spare > 0 else 0
        spare -= extra
        result.append(min(width, limit + extra))
    return result


def _shorten(text: str, width: int) -> str:
    """Shortens a sentence at its end, and a name in its middle, whose ends say more."""
    if len(text) <= width:
        return text
    if " " in text:
        return text[: width - 1] + _ELLIPSIS
    head = width // 2
    return text[:head] + _ELLIPSIS + text[len(text) - (width - 1 - head) :]


def progress_bar(*args: Any, unit: str, disable: bool, **others: Any) -> Any:
    """Returns a bar of tqdm: a widget in a notebook that has ipywidgets, else a line on stderr.

    Args:
        *args: what the bar counts, as for ``tqdm``.
        unit: what one of them is, such as ``batch``.
        disable: whether to draw no bar. None is drawn outside of terminals and IPython, such as in a log.
        **others: other options of ``tqdm``.
    """
    from tqdm import TqdmWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # at its import, in a notebook without ipywidgets
        from tqdm.auto import tqdm
    others |= {"unit": f" {unit}", "disable": disable or not (sys.stderr.isatty() or _ipython())}
    return tqdm(*args, **others)


def _ipython() -> Any:
    """Returns the shell of IPython in which this process runs, such as a notebook's; None outside."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def shorten_modules(describe: Callable[[Any], str]) -> None:
    """Makes a notebook show traced modules by ``describe``; does nothing outside of IPython.

    MegEngine's own ``repr`` of a module lists everything in it, and `prepare` and `calibrate` return modules.

    Args:
        describe: gives the text of a module; an error leaves MegEngine's.
    """
    shell = _ipython()
    if shell is None:
        return

    def write(module: Any, printer: Any, cycle: bool) -> None:
        try:
            text = describe(module)
        except Exception:  # a module that is being edited: the display must not fail
            text = repr(module)
        printer.text(text)

    formatter = shell.display_formatter.formatters["text/plain"]
    formatter.for_type_by_name("megengine.traced_module.traced_module", "TracedModule", write)
