"""The result of the one call: the file, its verdict, what became of each op, and a card of one page.

The card is for people who take the file, with the numbers that the terminal shows.
"""

from __future__ import annotations

import datetime
import html
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from qtrace.benchmarking.runners import file_size
from qtrace.comparing.sums import finite_values
from qtrace.config.recipe import dump_recipe
from qtrace.display import Displayed, format_bytes, format_table
from qtrace.errors import QtraceError
from qtrace.graph.interface import list_inputs, read_inputs
from qtrace.graph.types import TracedModule
from qtrace.inspection.explanation import Explanation, explain
from qtrace.preparation.annotation import PlacementNote, PlacementRow
from qtrace.preparation.figures import count_precisions, read_figures
from qtrace.preparation.model import QuantizedModel, fake_quants, read_record
from qtrace.quantizing.delivering import Delivery
from qtrace.quantizing.judging import Judgement
from qtrace.runtimes.host import RuntimeHost
from qtrace.sensitivity.diagnosis import SiteEvidence
from qtrace.sensitivity.diagnosis.verdict import Verdict
from qtrace.storage.files import replacing
from qtrace.verification.report import VerifyReport


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
        """Writes the card next to a file: ``NAME.card.json`` and ``NAME.card.html``.

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


_PACKAGES = ("qtrace", "megengine", "numpy", "onnx", "onnxruntime", "openvino", "ai-edge-litert", "ncnn")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
_BARS = 10  # layers that are drawn, so that the card stays one page


@dataclass(frozen=True, repr=False)
class Quantized(Displayed):
    """The result of ``qtrace.quantize``.

    Attributes:
        path: the file.
        judgement: the verdict with its causes, and the recipe that cures them.
        verify: the report of the file's run next to the graph; None if it was not run.
        prepared: the calibrated graph, to be trained on.
        converted: the graph that was exported, in float if `delivery` says so.
        raised: the layers that stay in float to keep the metric.
        traced: the float network.
        data: the name of the calibration data.
        delivery: the quantized file compared with float, and which of both was written: float
            if it is faster here, unless the config asks for the quantized one.
        seconds: name of a stage -> its time in seconds.
        runtime_host: the interpreter or machine that has the runtime; None for this one.
    """

    path: Path
    judgement: Judgement
    verify: VerifyReport | None
    prepared: TracedModule
    converted: TracedModule
    raised: tuple[str, ...] = ()
    traced: TracedModule | None = None
    data: str = ""
    delivery: Delivery = field(default_factory=Delivery)
    seconds: Mapping[str, float] = field(default_factory=dict)
    runtime_host: RuntimeHost | None = None

    @cached_property
    def card(self) -> Card:
        """The card of the file, for people who take it."""
        return _make_card(self)

    def _text(self, max_width: int | None) -> str:
        return "\n".join(self.summary())

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the calibrated graph; None if it could not be judged.

        If `delivery` says that the file is in float, it describes the quantized graph, which was left out.
        """
        return self.judgement.verdict

    def explain(self) -> Explanation:
        """Explains what became of each op of the file, as ``qtrace.explain`` does."""
        return explain(self.delivery.prepared or self.prepared)

    def to_dict(self) -> dict[str, Any]:
        """Returns verdict, causes and what was measured, for JSON; apart, the ones of a graph left out."""
        judged = self.judgement.to_dict()
        if self.delivery.in_float:
            judged = {"quantized_and_not_written": judged}
        return {**judged, **self.delivery.to_dict()}

    @property
    def placement(self) -> PlacementNote | None:
        """The placements that the calibrated graph has chosen from; None if it had no choice."""
        return read_record(self.prepared).annotation.placement

    def summary(self) -> list[str]:
        """Returns the file and `lines`."""
        return [str(self.path), *self.lines()]

    def lines(self) -> list[str]:
        """Returns the verdict with its causes, the choice, the speed, and what the runtime computed."""
        diagnosis, sentence = self.judgement.diagnosis, self.delivery.sentence()
        measured = sentence.removeprefix("speed: ").replace("not measured, ", "no: ", 1)
        judged = ["no verdict"] if diagnosis is None else diagnosis.lines()
        judged = [*judged, *self._open_sizes()]
        if not any(fake_quants(self.prepared)):
            judged.append("  no op of the file is on integers: `explain()` says why for each")
        if self.raised:
            judged.append(f"  in float to keep the metric: {', '.join(self.raised)}")
        if self.delivery.in_float:
            judged.insert(1, "  of the quantized file, which was not written")
        speed = [f"measured  {measured}"] if measured else []
        choice = [] if self.placement is None else self.placement.choice_lines()
        growth = [self.delivery.growth] if self.delivery.growth else []
        return [*judged, *choice, *speed, *growth, *self._verified()]

    def _verified(self) -> list[str]:
        """Says what the runtime computed."""
        if self.verify is None:
            return ["verified  no, the file was not run"]
        client = [f"  {self.verify.client}"] if self.verify.client else []
        if not self.verify.sites["op_by_op"]:
            return ["verified  the runtime computes what the graph computes", *client]
        tallies, worst = self.verify.sites["op_by_op"].values(), self.verify.worst_lsb()
        values, equal = (sum(getattr(tally, part) for tally in tallies) for part in ("values", "equal"))
        differ = f"{values - equal:,} of {values:,} integers differ from the graph's, by {worst} LSB at most"
        return [f"verified  {differ}" if worst else "verified  every integer equals the graph's", *client]

    def _open_sizes(self) -> list[str]:
        """Returns a line for each input whose sizes the network leaves open, with the data's sizes."""
        if self.traced is None or not (inputs := read_inputs(self.traced)):
            return []
        shapes = ("x".join(map(str, shape[1:])) for _, shape in list_inputs(self.traced))
        return [
            f"  size: {info.name} is {shape} in the first batch, and open in the network"
            for info, shape in zip(inputs.values(), shapes, strict=True)
            if info.sizes and None in info.sizes[1:]
        ]


def _make_card(result: Quantized) -> Card:
    """Makes the card of the file of ``qtrace.quantize``, with the numbers that the call has measured."""
    assert result.traced is not None
    delivery, diagnosis = result.delivery, result.judgement.diagnosis
    view, figures = QuantizedModel(result.converted), read_figures(result.converted)
    precision = count_precisions(view.annotation)
    inputs = {name: tuple(map(int, shape)) for name, shape in list_inputs(result.traced)}
    sizes = file_size(result.path), figures.bytes, figures.float_bytes
    in_float = delivery.in_float or diagnosis is None
    share = figures.integer_macs / max(figures.macs, 1)
    numbers = {
        "network": str(result.traced.graph._qualname),
        "target": view.config.backend,
        "data": result.data,
        "precision": dict(precision),
        "inputs": {name: list(shape) for name, shape in inputs.items()},
        **dict(zip(("bytes", "parameter_bytes", "float_parameter_bytes"), sizes, strict=True)),
        "macs": figures.macs,
        "integer_macs": figures.integer_macs,
        "worst_lsb": None if result.verify is None else result.verify.worst_lsb(),
        **delivery.to_dict(),
    }
    layers = sum(precision.values())
    size, stored, float_stored = map(format_bytes, sizes)
    facts = {
        "network": numbers["network"],
        "inputs": ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in inputs.items()),
        "target": view.config.backend,
        "precision": ", ".join(f"{name} in {count} of {layers} layers" for name, count in precision.items()),
        "size": f"{size}; parameters {stored}, {float_stored} in float",
        "MACs": f"{figures.macs:,}, {share:.1%} on integers",
        "data": result.data,
        "made": f"{_today()}, {', '.join(f'{name} {number}' for name, number in _versions().items())}",
        "stages": ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items()),
    }
    return Card(
        result.path.name,
        tuple(result.lines()),
        result.placement,
        None if in_float else result.verdict,
        {} if in_float or diagnosis is None else _noise(diagnosis.sites),
        _group_floats(result.explain()),
        {name: text for name, text in facts.items() if text},
        numbers,
        dump_recipe(view.config),
        {"made": _today(), "versions": _versions(), "stage_seconds": dict(result.seconds)},
    )


def _noise(sites: Sequence[SiteEvidence]) -> dict[str, float]:
    """Returns each layer's share of the noise at the outputs; of all roundings if no run measured that."""
    measured = [site for site in sites if site.output_noise is not None] or sites
    noise: dict[str, float] = {}
    for site in measured:
        own = site.channels.mean_relative_noise if site.output_noise is None else site.output_noise
        if math.isfinite(own):
            noise[site.op or site.site] = max(noise.get(site.op or site.site, 0.0), own)
    total = sum(noise.values())
    largest = sorted(noise.items(), key=lambda item: -item[1])[:_BARS]
    return {name: own / total for name, own in largest if own > 0.0}


def _group_floats(explanation: Explanation) -> tuple[FloatOps, ...]:
    """Returns the ops in float, those together whose reasons differ only in numbers, which become ranges."""
    kinds: dict[tuple[str, ...], dict[str, int]] = {}
    numbers: dict[tuple[str, ...], list[list[str]]] = {}
    for entry in explanation.to_dict()["summary"]["floats"]:
        words = tuple(_NUMBER.split(entry["reason"]))
        numbers.setdefault(words, []).append(_NUMBER.findall(entry["reason"]))
        own = kinds.setdefault(words, {})
        for kind, count in entry["kinds"].items():
            own[kind] = own.get(kind, 0) + count
    return tuple(FloatOps(own, _with_ranges(words, numbers[words])) for words, own in kinds.items())


def _with_ranges(words: Sequence[str], numbers: Sequence[Sequence[str]]) -> str:
    """Returns the words with a number, or the range of several, between each two."""
    text = words[0]
    for word, column in zip(words[1:], zip(*numbers, strict=True), strict=True):
        low, high = min(column, key=float), max(column, key=float)
        text += (low if low == high else f"{low} to {high}") + word
    return text


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # an extra that is not installed
            continue
    return versions
