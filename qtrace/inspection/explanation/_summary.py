"""The summary: how much of a graph is computed on integers, what keeps the rest in float, and its cures."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from qtrace.config import QConfig, Region, backends
from qtrace.config.tree import dump
from qtrace.errors import shorten_list
from qtrace.inspection.explanation._table import Index
from qtrace.preparation.annotation import ExprNote, PlacementNote

_PACKAGED = "qtrace/recipes/"


@dataclass(frozen=True)
class ConfigProposal:
    """A change of the config that quantizes ops; all that is given has to be done.

    Attributes:
        rule: a rule to add after the others, as plain data.
        drop: the numbers of rules to leave out.
        region: the region to set, as plain data.
        lines: the change in words, line by line.
    """

    rule: dict[str, Any] | None = None
    drop: tuple[int, ...] = ()
    region: dict[str, Any] | None = None
    lines: tuple[str, ...] = field(default=(), compare=False)

    def __bool__(self) -> bool:
        return bool(self.rule or self.drop or self.region)

    def to_dict(self) -> dict[str, Any]:
        """Returns the parts of the proposal that are set, as plain data."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value}


@dataclass(frozen=True)
class Proposals:
    """Finds the changes for the ops of one graph.

    Attributes:
        index: the decisions.
        qconfig: the config that led to them.
    """

    index: Index
    qconfig: QConfig

    @cached_property
    def backend(self) -> backends.Backend:
        """The target."""
        return backends.get(self.index.annotation.backend)

    def for_ops(self, notes: Sequence[ExprNote]) -> tuple[ConfigProposal | None, str]:
        """The change that quantizes ``notes``, which stay float for the same causes.

        Returns:
            The change, or None where a config cannot do it; and a sentence about it, or "".
        """
        first = notes[0]
        remark = self._beyond_configs(first)
        if remark:
            return None, remark
        rule: dict[str, Any] | None = None
        region: dict[str, Any] | None = None
        drop: tuple[int, ...] = ()
        lines: list[str] = []
        if "region" in first.causes:
            region = self._wider(notes)
            lines.append(f"set region: {dump(region, flow=True).strip()}")
        if "placement" in first.causes:
            match = self._match(notes) if len(notes) == 1 else {"op": first.kind}
            rule = {"match": match, "placement": "everything"}
        elif {"role", "kernel", "speed", "range", "selection"} & set(first.causes):
            rule = self._rule(notes)
        elif "rule" in first.causes and self._is_packaged(first):
            rule = self._overruling(notes)
        elif "rule" in first.causes:
            drop = self.silencing(first)
            lines += [f"drop {self._shown(rank)}" for rank in drop]
        if rule is not None:
            lines.append(f"add to rules: - {dump(rule, flow=True).strip()}")
        proposal = ConfigProposal(rule, drop, region, tuple(lines))
        return (proposal or None), self._remark(first)

    def _beyond_configs(self, note: ExprNote) -> str:
        """Says what to do about an op that no line of a config can quantize, or returns ""."""
        backend = self.backend
        if "unread" in note.causes:
            if not note.reason.startswith("no rule"):
                return "write the call in a form that its op rule reads, or extend the rule in qtrace/ops"
            return "it needs an op rule: a file in qtrace/ops, see ARCHITECTURE.md, How to add"
        if "dtype" in note.causes:
            return "only float32 values are quantized, so no line of a config changes it"
        if "infinity" in note.causes:
            return "no grid holds such a number beside others, so no line of a config changes it"
        if "range" in note.causes and note.role == "carry":
            return "it moves values that one grid would spoil"
        if "selection" in note.causes and note.role == "carry":
            return "it moves values that stay in float beside a selection"
        if note.causes == ("idle",):
            return (
                "it moves values: it holds integers as soon as the op before it, or every one behind it, does"
            )
        if "kernel" in note.causes and not backend.rounds_around_float:
            able = [b.name for b in map(backends.get, backends.known()) if note.kind in b.ops]
            others = f"; backends with one: {', '.join(able)}" if able else ""
            return f"no line of a config gives backend {backend.name} a kernel for it{others}"
        return ""

    def _remark(self, note: ExprNote) -> str:
        if note.causes[:1] == ("range",):
            return _loss(note.reason)
        if {"role", "kernel"} & set(note.causes) and note.kind not in self.backend.ops:
            return "the op itself still computes in float, between integers"
        return ""

    # -- rules --------------------------------------------------------------------------------------

    def _rule(self, notes: Sequence[ExprNote]) -> dict[str, Any]:
        """Returns the rule that quantizes around ``notes``; 16 bits where 8 would cost what float keeps."""
        rule: dict[str, Any] = {"match": self._match(notes), "quantize": True}
        limits = self.backend.limits.get("activation")
        if "role" in notes[0].causes and limits is not None and 16 in limits.bits:
            rule["activation"] = {"bits": 16}
        return rule

    def _match(self, notes: Sequence[ExprNote]) -> dict[str, Any]:
        """Returns the conditions that ``notes``, ops of one kind, meet and no others."""
        kind = notes[0].kind
        if len(notes) == self._count[kind]:
            return {"op": kind}
        # Others of this kind are quantized, or stay float on purpose.
        return {"op": kind, "name": [n.name for n in notes] if len(notes) > 1 else notes[0].name}

    @cached_property
    def _count(self) -> dict[str, int]:
        """Op kind -> how many ops a rule for it would match."""
        counts: dict[str, int] = {}
        for note in self.index.annotation.notes:
            if note.state != "shape" and note.kind:
                counts[note.kind] = counts.get(note.kind, 0) + 1
        return counts

    def silencing(self, note: ExprNote) -> tuple[int, ...]:
        """The numbers of the rules by which ``note`` stays float: without any of them it would not."""
        ranks: list[int] = []
        for rank in reversed(note.ranks):
            quantize = self.qconfig.rules[rank].quantize
            if quantize:
                break
            if quantize is False:
                ranks.append(rank)
        return tuple(reversed(ranks))

    def _is_packaged(self, note: ExprNote) -> bool:
        """Whether a rule that comes with qtrace keeps ``note`` in float: nobody should edit that."""
        origins = self.index.annotation.origins
        return any(origins[rank].startswith(_PACKAGED) for rank in self.silencing(note))

    def _overruling(self, notes: Sequence[ExprNote]) -> dict[str, Any]:
        """A rule that wins over the one by which ``notes`` stay float, for the same kinds of op."""
        if len(notes) == 1:
            return {"match": {"name": notes[0].name}, "quantize": True}
        match = self.qconfig.rules[self.silencing(notes[0])[-1]].match.to_dict()
        kinds = list(dict.fromkeys(note.kind for note in notes))
        return {"match": {**match, "op": kinds if len(kinds) > 1 else kinds[0]}, "quantize": True}

    def _shown(self, rank: int) -> str:
        rule = dump(self.qconfig.rules[rank].to_dict(), flow=True).strip()
        return f"{self.index.annotation.origins[rank]}: - {rule}"

    # -- regions ------------------------------------------------------------------------------------

    def _wider(self, notes: Sequence[ExprNote]) -> dict[str, Any]:
        """The region with ``notes`` in it: only those are named that no other of them leads to."""
        region = self.qconfig.region or Region()
        before, behind = self._beside_region
        sides: dict[str, list[str]] = {}
        if region.inputs is not None:
            above = self._reached(notes, forward=True)
            starts = [n.name for n in notes if n.name not in behind and n.name not in above]
            sides["inputs"] = [*region.inputs, *starts]
        if region.outputs is not None:
            below = self._reached(notes, forward=False)
            ends = [n.name for n in notes if n.name not in before and n.name not in below]
            sides["outputs"] = [*region.outputs, *ends]
        return {side: names if len(names) > 1 else names[0] for side, names in sides.items()}

    def _reached(self, notes: Sequence[ExprNote], forward: bool) -> set[str]:
        """The ops after some of ``notes``, or before some of them."""
        reached: set[str] = set()
        if len(notes) == 1:
            return reached
        chosen = {note.name for note in notes}
        order = self.index.annotation.notes
        for note in order if forward else reversed(order):
            near = self._sources(note) if forward else self._users(note)
            if any(n.name in chosen or n.name in reached for n in near):
                reached.add(note.name)
        return reached

    def _sources(self, note: ExprNote) -> list[ExprNote]:
        return [self.index.notes[name] for name in note.reads if name in self.index.notes]

    def _users(self, note: ExprNote) -> list[ExprNote]:
        return [user for name in note.gives for user in self.index.readers.get(name, ())]

    @cached_property
    def _beside_region(self) -> tuple[set[str], set[str]]:
        """The ops before something of the region, and the ops after something of it."""
        order = [n for n in self.index.annotation.notes if n.state != "shape"]
        before: set[str] = set()
        behind: set[str] = set()
        for reached, notes, near in (
            (before, reversed(order), self._users),
            (behind, order, self._sources),
        ):
            for note in notes:
                if any(self._inside(other) or other.name in reached for other in near(note)):
                    reached.add(note.name)
        return before, behind

    @staticmethod
    def _inside(note: ExprNote) -> bool:
        return note.state != "shape" and "region" not in note.causes


def _loss(reason: str) -> str:
    """Says what is lost if an op is quantized that stays float for ``reason``, as one grid spoils values."""
    if "would keep" in reason:
        return f"quantized, it costs what float keeps: {reason.replace('would keep', 'keeps')}"
    if "no such bound" in reason:
        return f"quantized, the smaller part may be lost: {reason}"
    return f"quantized, its values lose the half step of a grid, and more at large values: {reason}"


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
    fields = {key: value for key, value in vars(placement).items() if key not in ("times", "reasons")}
    return {**fields, "rows": [vars(row) for row in placement.rows]}


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
