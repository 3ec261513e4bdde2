"""Proposes the change of a config that quantizes an op that stays float."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from qtrace.config import QConfig, Region, backends
from qtrace.config.tree import dump
from qtrace.inspection.explanation._index import Index
from qtrace.preparation.annotation import ExprNote

__all__ = ["ConfigProposal", "Proposals"]

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
