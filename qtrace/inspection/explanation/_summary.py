"""The summary: how much of a graph is computed on integers, and what is in the way of the rest."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qtrace.errors import shorten_list
from qtrace.inspection.explanation._index import Index
from qtrace.inspection.explanation._proposals import ConfigProposal, Proposals
from qtrace.preparation.annotation import ExprNote, PlacementNote

__all__ = ["Floats", "Summary"]

_STATES = {
    "int": "on integers",
    "fused": "fused into these",
    "carried": "moving integers",
    "float": "in float",
}
_TIGHT = "\u00a0"  # a space where no line is broken


@dataclass(frozen=True)
class Floats:
    """Ops that stay float for the same reason.

    Attributes:
        notes: the ops.
        proposal: the change of the config that quantizes them; None where there is none.
        remark: a sentence about it, or what else there is to do; or "".
    """

    notes: tuple[ExprNote, ...]
    proposal: ConfigProposal | None
    remark: str

    @property
    def reason(self) -> str:
        """Why they stay float."""
        if self.notes[0].causes[:1] == ("placement",) and len(self.notes) > 1:
            return "integers would gain too little time there, or add too much noise (--why says it of each)"
        return self.notes[0].reason

    @property
    def islands(self) -> int:
        """In how many float islands they lie."""
        return len({n.island for n in self.notes if n.island})

    @property
    def kinds(self) -> str:
        """The kinds of the ops and how many there are of each, in words."""
        return ", ".join(f"{n} {kind}" for kind, n in Counter(n.kind or n.op for n in self.notes).items())

    def to_dict(self) -> dict[str, Any]:
        """Returns the entry as plain data."""
        return {
            "ops": [n.name for n in self.notes],
            "kinds": dict(Counter(n.kind or n.op for n in self.notes)),
            "causes": list(self.notes[0].causes),
            "reason": self.reason,
            "proposal": None if self.proposal is None else self.proposal.to_dict(),
            "remark": self.remark,
        }


@dataclass(frozen=True)
class Summary:
    """A graph in numbers.

    Attributes:
        index: the annotation of the graph, indexed.
        proposals: proposes changes of the config.
        comments: the comment above each rule of the recipe; empty if unknown.
        sizes: which axes of the inputs are open, in words.
    """

    index: Index
    proposals: Proposals
    comments: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()

    @cached_property
    def ops(self) -> dict[str, int]:
        """State -> how many ops have it."""
        counts = Counter(n.state for n in self.index.annotation.notes)
        return {state: counts[state] for state in (*_STATES, "shape")}

    @cached_property
    def float_kernels(self) -> dict[str, int]:
        """Kind -> how many ops on integers the runtime computes in float, for want of an integer kernel."""
        kinds = self.proposals.backend.float_kernels
        notes = self.index.annotation.notes
        return dict(Counter(n.kind for n in notes if n.state == "int" and n.kind in kinds).most_common())

    @cached_property
    def sites(self) -> dict[str, int]:
        """Sort -> how many sites are of it."""
        counts = Counter(s.sort for s in self.index.annotation.sites)
        return {sort: counts[sort] for sort in ("activation", "weight", "bias")}

    @cached_property
    def macs(self) -> dict[str, int]:
        """``int4``, ``int8``, ``int16`` or ``float`` -> multiplications with accumulation computed so.

        An op counts by its widest input.
        """
        macs = dict.fromkeys(("int4", "int8", "int16", "float"), 0)
        for note in self.index.annotation.notes:
            macs[self._width(note)] += note.macs
        return macs

    def _width(self, note: ExprNote) -> str:
        if note.state != "int":
            return "float"
        plans = [self.index.plan(group) for group in (*note.inputs, note.weight) if group]
        bits = max((p.scheme.bits for p in plans if p is not None), default=8)
        return "int4" if bits <= 4 else "int8" if bits <= 8 else "int16"

    @cached_property
    def islands(self) -> dict[str, int]:
        """The kinds in a float island, such as ``exp + softmax`` -> how many islands there are of these."""
        makers = ([n for n in m if n.causes != ("idle",)] or m for m in self.index.islands.values())
        kinds = ({n.kind or n.op for n in notes} for notes in makers)
        return dict(Counter(" + ".join(sorted(names)) for names in kinds).most_common())

    @cached_property
    def requantized(self) -> tuple[str, ...]:
        """The sites on values that hold integers already, with other parameters."""
        sites = (s for s in self.index.annotation.sites if s.sort == "activation" and s.consumers is not None)
        return tuple(s.name for s in sites if self.index.group(s.node))

    @cached_property
    def shared(self) -> dict[str, list[str]]:
        """Group -> its sites, where there is more than one."""
        return {group: [s.name for s in m] for group, m in self.index.members.items() if len(m) > 1}

    @cached_property
    def floats(self) -> tuple[Floats, ...]:
        """The ops that stay float, by reason: most islands first, ops that follow their neighbours last."""
        notes: dict[object, list[ExprNote]] = {}
        for note in self.index.annotation.notes:
            if note.state == "float":
                notes.setdefault(self._key(note), []).append(note)
        floats = (Floats(tuple(n), *self.proposals.for_ops(n)) for n in notes.values())
        return tuple(sorted(floats, key=lambda f: (f.notes[0].causes == ("idle",), -f.islands)))

    def _key(self, note: ExprNote) -> object:
        if note.causes == ("idle",):
            return note.causes
        if note.causes == ("placement",):
            return note.causes, note.kind
        if note.causes in (("rule",), ("region",), ("region", "rule")):  # one change for ops of any kind
            return note.causes, note.reason, self.proposals.silencing(note)
        return note.causes, note.reason, note.kind or note.op

    def to_dict(self) -> dict[str, Any]:
        """Returns the summary as plain data."""
        placement = self.index.annotation.placement
        return {
            "backend": self.index.annotation.backend,
            "ops": self.ops,
            "float_kernels": self.float_kernels,
            "sites": self.sites,
            "macs": self.macs,
            "islands": self.islands,
            "requantized": list(self.requantized),
            "shared": self.shared,
            "floats": [f.to_dict() for f in self.floats],
            **({"sizes": list(self.sizes)} if self.sizes else {}),
            **({} if placement is None else {"placement": _placement_data(placement)}),
        }

    # -- as text ------------------------------------------------------------------------------------

    def text(self, width: int | None = 100) -> str:
        """A few lines for a person; lines of a config are never broken.

        Args:
            width: columns to fit into; None for no limit.
        """
        lines = [f"{name + ':':<14} {text}" for name, text in self._figures().items()]
        wrapped = [_wrap(line, width, " " * 15) for line in lines]
        if self.floats:
            wrapped += ["", "What stays in float, and what would change it:"]
            shown: set[str] = set()
            wrapped += [self._float_text(f, width, shown) for f in self.floats]
        return "\n".join(wrapped)

    def _figures(self) -> dict[str, str]:
        ops = ", ".join(f"{self.ops[state]} {words}" for state, words in _STATES.items() if self.ops[state])
        shapes = f" (and {self.ops['shape']} on shapes and constants)" if self.ops["shape"] else ""
        sites = ", ".join(f"{count} {sort}" for sort, count in self.sites.items() if count)
        figures = {
            "backend": self.index.annotation.backend,
            "ops": (ops or "none") + shapes,
            **({"on integers": self._meaning()} if self.ops["int"] else {}),
            "MACs": self._shares() or "none",
            "sites": sites or "none",
            **({"sizes": "; ".join(self.sizes)} if self.sizes else {}),
        }
        if (placement := self.index.annotation.placement) is not None:
            figures["placement"] = _predicted(placement)
        elif reason := self._unplaced():
            figures["placement"] = reason
        if self.requantized:
            sites = "site" if len(self.requantized) == 1 else "sites"
            on = f"on values that are quantized already ({shorten_list(self.requantized)})"
            figures["rounded twice"] = f"{len(self.requantized)} {sites} {on}"
        if self.shared:
            groups = (f"{group} ({len(names)} sites)" for group, names in self.shared.items())
            figures["shared"] = f"parameters of {shorten_list(groups)}"
        if self.islands:
            kinds_text = ", ".join(f"{n} x {kinds}".replace(" ", _TIGHT) for kinds, n in self.islands.items())
            figures["float islands"] = f"{sum(self.islands.values())} between integers: {kinds_text}"
        return figures

    def _unplaced(self) -> str:
        """Says why a placement that the config asks for is without effect; "" if it asks for none."""
        config, backend = self.proposals.qconfig, self.proposals.backend
        asked = {config.effective_placement, *(rule.placement for rule in config.rules)}
        modes = " and ".join(mode for mode in ("balanced", "fastest", "small") if mode in asked)
        if not modes or backend.cost_table or config.cost_table:
            return ""
        return (
            f"{modes} does nothing: backend {backend.name} lacks measured times, so all ops that can are "
            "quantized; a `cost_table` of your device would have an effect"
        )

    def _meaning(self) -> str:
        """Says what "on integers" means, and how many ops the runtime lacks an integer kernel for."""
        name, kinds = self.index.annotation.backend, self.float_kernels
        meaning = f"simulated by the rules of backend {name}"
        if kinds:
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            meaning += f", which computes {sum(kinds.values())} of these ops in float kernels ({counts})"
        return f"{meaning}; verify of an ONNX file counts the ops that run in integer kernels"

    def _shares(self) -> str:
        total = sum(self.macs.values())
        shares = {kind: macs for kind, macs in self.macs.items() if macs}
        return ", ".join(f"{_percent(macs, total)} {kind}" for kind, macs in shares.items())

    def _comment(self, note: ExprNote) -> str:
        """Returns the recipe's comment above the rule that keeps ``note`` in float."""
        ranks = self.proposals.silencing(note) if note.causes[:1] == ("rule",) else ()
        return self.comments[ranks[-1]] if ranks and self.comments else ""

    def _float_text(self, floats: Floats, width: int | None, shown: set[str]) -> str:
        """Returns the lines of one entry; adds its comment to ``shown``, and leaves out a comment in it."""
        names = shorten_list(n.name for n in floats.notes)
        islands = f", in {floats.islands} island{'s' if floats.islands > 1 else ''}" if floats.islands else ""
        lines = [_wrap(f"  {floats.kinds}{islands}: {names}", width, "      ")]
        lines.append(_wrap(f"    why: {floats.reason}", width, "         "))
        comment = self._comment(floats.notes[0])
        if comment and comment not in shown:
            shown.add(comment)
            lines.append(_wrap(f"         ({comment})", width, "          "))
        lines += [f"    {line}" for line in (floats.proposal.lines if floats.proposal else ())]
        if floats.remark:
            lines.append(
                _wrap(f"    {'note' if floats.proposal else 'so'}: {floats.remark}", width, "         ")
            )
        return "\n".join(lines)


def _predicted(placement: PlacementNote) -> str:
    """Says what time a placement predicts, and what it was chosen from."""
    faster = placement.float_milliseconds / max(placement.milliseconds, 1e-9)
    text = (
        f"{placement.mode}: {placement.milliseconds:.3g} ms predicted, {placement.float_milliseconds:.3g} ms "
        f"in float ({faster:.2f}x), in one thread by cost table {placement.table}"
    )
    if placement.conclusion:
        text += f"; {placement.conclusion}"
    if placement.mode == "balanced" and not placement.rows:
        text += "; `calibrate` switches off what is not worth its noise"
    if not placement.rows:
        return text
    rows = (
        f"{row.name} {row.speed:.2f}x {'-' if row.sqnr is None else f'{row.sqnr:.1f} dB'}"
        for row in placement.rows
    )
    return f"{text}; {placement.chosen} of {', '.join(rows)}"


def _placement_data(placement: PlacementNote) -> dict[str, Any]:
    """Returns the prediction for the whole graph as plain data."""
    kept = {key: value for key, value in vars(placement).items() if key not in ("times", "reasons")}
    return {**kept, "rows": [vars(row) for row in placement.rows]}


def _wrap(line: str, width: int | None, indent: str) -> str:
    """Wraps ``line`` if it is too long; words (names and paths) stay whole."""
    if width is None or len(line) <= width:
        return line.replace(_TIGHT, " ")
    wide = max(width, 40)
    parts = textwrap.wrap(
        line, wide, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(parts).replace(_TIGHT, " ")


def _percent(part: int, whole: int) -> str:
    """Formats a share in percent; only the whole gives 100 %."""
    if part == whole:
        return "100 %"
    return f"{min(max(100 * part / whole, 0.1), 99.9):.1f} %"
