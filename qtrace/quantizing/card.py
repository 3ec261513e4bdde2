"""A card of a file: one page for people who take it, with the numbers that the terminal shows."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qtrace.display import Displayed, format_bytes, format_table
from qtrace.errors import QtraceError
from qtrace.metrics import finite_values
from qtrace.preparation.annotation import PlacementNote, PlacementRow
from qtrace.sensitivity.diagnosis.verdict import Verdict
from qtrace.storage.files import replacing

__all__ = ["TIMED", "Card", "FloatOps"]

# Suffix of a file that a runtime runs here -> the runtime and its package.
TIMED = {
    ".onnx": ("onnxruntime", "onnxruntime"),
    ".tflite": ("litert", "ai-edge-litert"),
    ".param": ("ncnn", "ncnn"),
}


@dataclass(frozen=True)
class FloatOps:
    """Ops that compute in float for one reason.

    Attributes:
        kinds: kind of op -> the number of such ops.
        reason: why they are not on integers.
    """

    kinds: Mapping[str, int]
    reason: str

    def names(self) -> str:
        """Returns the kinds with their numbers in words."""
        return ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())


@dataclass(frozen=True, repr=False)
class Card(Displayed):
    """What somebody who takes a file should know of it.

    Attributes:
        file: the name of the file.
        lines: what the terminal shows of it: verdict, doubts, causes, choice, speed and verification.
        placement: the placements that there were, of which the file is one; None without a choice.
        verdict: how close the file is to float, by output group; None if it is in float or was not judged.
        noise: name of a layer -> its share of the noise, the largest first.
        floats: the ops in float, by reason.
        facts: the network, its inputs, sizes and MACs, in words.
        figures: the same in numbers, and what was measured, for JSON.
        recipe: the config as a recipe.
        made: the day, the versions of packages, and the seconds of each stage.
    """

    file: str
    lines: tuple[str, ...]
    placement: PlacementNote | None
    verdict: Verdict | None
    noise: Mapping[str, float]
    floats: tuple[FloatOps, ...]
    facts: Mapping[str, str]
    figures: Mapping[str, Any]
    recipe: str
    made: Mapping[str, Any]

    def table(self) -> str:
        """Returns the card as text."""
        parts = ["\n".join(self.lines), format_table((self.file, ""), self.facts.items(), None)]
        if groups := self._groups():
            parts.append(format_table(("output", "SQNR dB"), groups, None))
        if self.noise:
            shares = [(name, f"{share:.0%}") for name, share in self.noise.items()]
            parts.append(format_table(("noise of", "share"), shares, None))
        if self.floats:
            parts.append(format_table(("in float", "why"), self._floats(), None))
        return "\n\n".join(parts)

    def _rows(self) -> tuple[PlacementRow, ...]:
        return () if self.placement is None else self.placement.rows

    def _choice(self) -> list[tuple[str, str, str, str]]:
        chosen = "" if self.placement is None else self.placement.chosen
        return [
            (
                f"* {row.name}" if row.name == chosen else row.name,
                f"{row.speed:.2f}x",
                "-" if row.sqnr is None else f"{row.sqnr:.1f}",
                format_bytes(row.bytes),
            )
            for row in self._rows()
        ]

    def _groups(self) -> list[tuple[str, str]]:
        groups = () if self.verdict is None else self.verdict.groups
        return [(g.name, f"{g.sqnr_db:.1f}" if math.isfinite(g.sqnr_db) else "exact") for g in groups]

    def _floats(self) -> list[tuple[str, str]]:
        return [(ops.names(), ops.reason) for ops in self.floats]

    def to_dict(self) -> dict[str, Any]:
        """Returns the card as plain data."""
        plain: dict[str, Any] = finite_values(
            {
                "file": self.file,
                **self.figures,
                "choice": [asdict(row) for row in self._rows()],
                "verdict": None if self.verdict is None else asdict(self.verdict),
                "noise": dict(self.noise),
                "float": [{"ops": dict(ops.kinds), "reason": ops.reason} for ops in self.floats],
                "recipe": self.recipe,
                **self.made,
            }
        )
        return plain

    def html(self) -> str:
        """Returns the card as one self-contained page."""
        choice = [] if self.placement is None else self.placement.choice_lines()
        word = "check" if self.verdict is None else self.verdict.word
        told = "\n".join(line for line in self.lines if line not in choice)
        measured = [
            _as_table("Choice", ("", "speed", "SQNR dB", "size"), self._choice()),
            _as_table("Outputs", ("output", "SQNR dB"), self._groups()),
            _as_bars("Where the noise comes from", self.noise),
        ]
        parts = [
            f'<pre class="{word}">{_escape(told)}</pre>',
            f"<div>{''.join(measured)}</div>",
            _as_table("In float", ("ops", "why"), self._floats()),
            _as_table("File", (), list(self.facts.items())),
            f"<details><summary>Recipe</summary><pre>{_escape(self.recipe)}</pre></details>",
        ]
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>{_escape(self.file)}: card</title><style>{_STYLE}</style></head>"
            f"<body><h1>{_escape(self.file)}</h1>{''.join(parts)}</body></html>\n"
        )

    def save(self, path: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Writes the card beside a file: ``NAME.card.json`` and ``NAME.card.html``.

        Args:
            path: the file that the card describes.

        Returns:
            The paths of both.

        Raises:
            QtraceError: when they cannot be written.
        """
        base = Path(path)
        data, page = (base.with_name(f"{base.name}.card.{kind}") for kind in ("json", "html"))
        try:
            with replacing(data, page) as (first, second):
                first.write((json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n").encode())
                second.write(self.html().encode())
        except OSError as error:
            raise QtraceError(f"{data} cannot be written: {error.strerror or error}.") from error
        return data, page


_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;max-width:60em;margin:1.5em auto;padding:0 1em;color:#222}
h1{font-size:1.5em;margin:0 0 .5em}h2{font-size:1.05em;margin:1.2em 0 .3em}
table{border-collapse:collapse}td,th{padding:.15em 1.5em .15em 0;text-align:left;vertical-align:top}
th{border-bottom:1px solid #999;font-weight:600}td:first-child{white-space:nowrap}
pre{background:#f4f4f4;padding:.7em 1em;white-space:pre-wrap;border-left:4px solid #999;margin:0}
.good{border-color:#2a8a3e}.check{border-color:#d39b00}.broken{border-color:#c0392b}
div{display:flex;flex-wrap:wrap;gap:0 4em}
.bar{display:inline-block;height:.8em;background:#4a7ab5;margin-right:.5em}
details{margin-top:1.2em}summary{cursor:pointer;font-weight:600}
"""


def _escape(text: str) -> str:
    return html.escape(text, quote=False)


def _as_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as HTML below its title; "" without rows."""
    listed = "".join(f"<tr>{''.join(f'<td>{_escape(c)}</td>' for c in row)}</tr>" for row in rows)
    head = "".join(f"<th>{_escape(name)}</th>" for name in headers)
    return f"<section><h2>{title}</h2><table><tr>{head}</tr>{listed}</table></section>" if listed else ""


def _as_bars(title: str, shares: Mapping[str, float]) -> str:
    """Returns a bar chart as HTML below its title; "" without shares."""
    most = max(shares.values(), default=1.0)
    rows = "".join(
        f"<tr><td>{_escape(name)}</td><td><span class=bar style='width:{12 * share / most:.2f}em'></span>"
        f"{share:.0%}</td></tr>"
        for name, share in shares.items()
    )
    return f"<section><h2>{title}</h2><table>{rows}</table></section>" if rows else ""
