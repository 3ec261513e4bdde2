"""What explain shows of each op: ops and sites by name, their parameters, the algorithms, and the table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from qtrace.config.checking import is_packaged
from qtrace.display import GAP, format_table
from qtrace.errors import shorten_list
from qtrace.preparation.annotation import Annotation, ExprNote, Fold, Plan, Site
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes.base import Left
from qtrace.scheme import QParams


def numbers(model: QuantizedModel) -> dict[str, QParams]:
    """Group -> its parameters, for every group of ``model`` that has been calibrated."""
    return {fq.site: fq.qparams() for fq in model.fake_quants.values() if fq.calibrated}


def describe_native(model: QuantizedModel) -> dict[str, str]:
    """Group -> the layer of MegEngine's own quantization that its scale comes from, in words."""
    scales, native = numbers(model), {}
    for group, own in model.record.native.items():
        trained = group in scales and bool(np.any(scales[group].scale != np.float32(own.scale)))
        native[group] = own.origin + (f", whose scale {own.scale:.4g} was trained on" if trained else "")
    return native


def _range(qparams: QParams) -> tuple[np.ndarray, np.ndarray]:
    scheme, scale = qparams.scheme, qparams.scale.astype(np.float64)
    low, high = (scale * (end - qparams.zero_point) for end in (scheme.qmin, scheme.qmax))
    return low, high


def describe(qparams: QParams) -> str:
    """Scale, zero point and range in words."""
    low, high = _range(qparams)
    zero = qparams.zero_point
    points = f"{zero.min()}" if zero.min() == zero.max() else f"{zero.min()} to {zero.max()}"
    return f"{_scales(qparams.scale)}, zero point {points}, range {low.min():.4g} to {high.max():.4g}"


def _scales(scale: np.ndarray) -> str:
    if scale.size == 1:
        return f"scale {float(scale.reshape(())):.4g}"
    return f"{scale.size} scales from {scale.min():.4g} to {scale.max():.4g}"


def describe_bias(qparams: Mapping[str, QParams], site: Site) -> str:
    """The scale of a bias in words; "" when it is not known."""
    scale = _bias_scale(qparams, site)
    return "" if scale is None else _scales(scale)


def _bias_scale(qparams: Mapping[str, QParams], site: Site) -> np.ndarray | None:
    if site.activation not in qparams or site.weight not in qparams:
        return None
    scale = qparams[site.activation].scale * np.float32(site.factor)
    return np.asarray(scale * qparams[site.weight].scale)


def of_site(qparams: Mapping[str, QParams], site: Site) -> dict[str, Any] | None:
    """The parameters of a site and their range as plain data; None when they are not known."""
    if site.sort == "bias":
        scale = _bias_scale(qparams, site)
        return None if scale is None else {"scale": scale.tolist(), "zero_point": 0}
    if site.group not in qparams:
        return None
    own = qparams[site.group]
    low, high = _range(own)
    span = [float(low.min()), float(high.max())]
    return {"scale": own.scale.tolist(), "zero_point": own.zero_point.tolist(), "range": span}


@dataclass(frozen=True)
class Index:
    """An annotation by name; every table is made once, in time linear in the graph.

    Attributes:
        annotation: the decisions for one graph.
        of_file: name of a node -> its names in the ONNX file that the graph was imported from.
    """

    annotation: Annotation
    of_file: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def notes(self) -> dict[str, ExprNote]:
        """The name of any output -> the note of the op that gives it."""
        return {name: note for note in self.annotation.notes for name in (note.name, *note.gives)}

    @cached_property
    def sites(self) -> dict[str, Site]:
        """The name of a site -> the site."""
        return {site.name: site for site in self.annotation.sites}

    @cached_property
    def at(self) -> dict[str, list[Site]]:
        """The name of a node -> the sites on its value."""
        sites: dict[str, list[Site]] = {}
        for site in self.annotation.sites:
            sites.setdefault(site.node, []).append(site)
        return sites

    @cached_property
    def members(self) -> dict[str, list[Site]]:
        """A group -> the sites that share its parameters."""
        sites: dict[str, list[Site]] = {}
        for site in self.annotation.sites:
            sites.setdefault(site.group, []).append(site)
        return sites

    @cached_property
    def readers(self) -> dict[str, list[ExprNote]]:
        """The name of a node -> the ops that read it."""
        notes: dict[str, list[ExprNote]] = {}
        for note in self.annotation.notes:
            for name in dict.fromkeys(note.reads):
                notes.setdefault(name, []).append(note)
        return notes

    @cached_property
    def followers(self) -> dict[str, list[ExprNote]]:
        """The name of an op -> the ops that are fused into it."""
        notes: dict[str, list[ExprNote]] = {}
        for note in self.annotation.notes:
            if note.into:
                notes.setdefault(note.into, []).append(note)
        return notes

    def names(self, note: ExprNote) -> list[str]:
        """Returns the names of an op: of its results, also in the file, and of the modules around it."""
        parts = note.path.split(".") if note.path else []
        modules = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        of_file = (name for node in (note.name, *note.gives) for name in self.of_file.get(node, ()))
        return list(dict.fromkeys((*note.gives, *of_file, *modules)))

    def is_last(self, note: ExprNote) -> bool:
        """Whether the result of ``note`` leaves its kernel."""
        kernel = self.followers.get(note.into or note.name)
        return not kernel or kernel[-1] is note

    @cached_property
    def biases(self) -> dict[str, Site]:
        """The name of a layer's output -> the site of its bias."""
        return {name: s for s in self.annotation.sites if s.sort == "bias" for name in s.consumers or ()}

    @cached_property
    def folds(self) -> dict[str, Fold]:
        """The name of a layer's output -> the BatchNorm that is folded into it."""
        return {fold.layer: fold for fold in self.annotation.folds}

    @cached_property
    def islands(self) -> dict[int, list[ExprNote]]:
        """The number of a float island -> its ops."""
        notes: dict[int, list[ExprNote]] = {}
        for note in self.annotation.notes:
            if note.island:
                notes.setdefault(note.island, []).append(note)
        return notes

    def group(self, node: str) -> str:
        """Returns the group of the integers that a node holds for all its readers; "" for a float node."""
        groups = (s.group for s in self.at.get(node, ()) if s.sort == "activation" and s.consumers is None)
        return self.annotation.carried.get(node) or next(groups, "")

    def plan(self, group: str) -> Plan | None:
        """Returns the plan of a group; None for groups of biases and for ""."""
        site = self.sites.get(group)
        return None if site is None else site.plan

    def scheme(self, group: str) -> str:
        """Returns the scheme of a group in words, or ""."""
        plan = self.plan(group)
        return "" if plan is None else plan.scheme.describe()


def describe_algorithms(reports: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describes the reports of algorithms, line by line.

    Args:
        reports: the reports in the record of a model.
    """
    return [line for report in reports for line in _lines(report)]


def _lines(report: Mapping[str, Any]) -> list[str]:
    options = ", ".join(f"{key} {value}" for key, value in report["options"].items())
    parts = [f"{len(report['changed'])} changed", f"{len(report['left'])} left"]
    name = f"{report['algorithm']}{f' ({options})' if options else ''}"
    lines = [f"{name}: {', '.join(parts)}"]
    if outputs := _both(report.get("outputs", ())):
        ratios = shorten_list(f"{e['site']} {_ratios(e)}" for e in outputs)
        lines.append(f"  outputs: {ratios} (SQNR on {report['measured']})")
    lines += _sites(_both(report["errors"]))
    if not is_packaged(report["algorithm"]):
        return [*lines, *_own_lines(report)]
    return [*lines, *_left(report)]


def _own_lines(report: Mapping[str, Any]) -> list[str]:
    """Returns every line of the report of a user's own algorithm: the user knows which of them matter."""
    left = [i if isinstance(i, str) else str(Left(i["site"], i["reason"])) for i in report["left"]]
    return [*(f"  {line}" for line in report["changed"]), *(f"  left {line}" for line in left)]


def _left(report: Mapping[str, Any]) -> list[str]:
    """Says what was not changed, a line for each reason."""
    lines = []
    reasons: dict[str, list[str]] = {}
    for left in report["left"]:
        if isinstance(left, str):  # the report of a model that was saved by an earlier release
            left = {"site": "", "reason": left}
        reasons.setdefault(left["reason"], []).extend([left["site"]] if left["site"] else [])
    for reason, sites in reasons.items():
        lines.append(f"  left {shorten_list(sites)}: {reason}" if sites else f"  left: {reason}")
    return lines


def _both(errors: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the errors that were measured before and after."""
    return [e for e in errors if e["before"] is not None and e["after"] is not None]


def _ratios(error: Mapping[str, Any]) -> str:
    return f"{error['before']:.1f} -> {error['after']:.1f} dB"


def _sites(errors: list[Mapping[str, Any]]) -> list[str]:
    """Says how many sites gained and lost, and which gained and lost most."""
    gains = sorted(errors, key=lambda e: float(e["before"] - e["after"]))
    better = [e for e in gains if round(e["after"] - e["before"], 1) > 0]  # as far as the text shows it
    worse = [e for e in reversed(gains) if round(e["before"] - e["after"], 1) > 0]
    same = len(errors) - len(better) - len(worse)
    parts = [
        f"{len(changed)} {word} ({changed[0]['site']} {_ratios(changed[0])}"
        + (" the most)" if len(changed) > 1 else ")")
        for changed, word in ((better, "better"), (worse, "worse"))
        if changed
    ]
    parts += [f"{same} alike"] if same and parts else []
    return [f"  sites, each by itself: {', '.join(parts)}"] if parts else []


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
    _Column("op rule", _op_rule, 14),
    _Column("reason", lambda index, note: note.reason, 30),
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
    "scheme",
    "reason",
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
    rest = None if width is None else width - len(names[0]) - len(GAP)
    filled = {c: [c.cell(index, note) for note in notes] for c in _COLUMNS}
    filled = {c: cells for c, cells in filled.items() if any(cells)}
    spared = _spared(filled, rest)
    shown = {c.header: cells for c, cells in filled.items() if c.header not in spared}
    reasons = shown.pop("reason", None)
    needed = 0 if reasons is None else min(_COLUMNS[-1].min_width, max(map(len, reasons))) + len(GAP)
    room = None if rest is None else rest - needed
    lines = format_table(list(shown), zip(*shown.values(), strict=True), room).split("\n")
    if reasons is not None:
        room = None if rest is None else rest - len(lines[1]) - len(GAP)
        texts = format_table(["reason"], [[reason] for reason in reasons], room).split("\n")
        lines = [f"{line:{len(lines[1])}}{GAP}{text}" for line, text in zip(lines, texts, strict=True)]
    lines = [f"{name}{GAP}{line}".rstrip() for name, line in zip(names, lines, strict=True)]
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
        c.header: max(len(c.header), min(c.min_width, max(map(len, v)))) + len(GAP) for c, v in filled.items()
    }
    spared: list[str] = []
    for header in _SPARED:
        if width is None or sum(needs.values()) - len(GAP) <= width:
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
