"""Which rules of a recipe meet which ops of a model, for ``qtrace recipes check``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time they load MegEngine, which --help does without
    from qtrace.config import QConfig
    from qtrace.graph.types import TracedModule

__all__ = ["Met", "match", "placed", "table"]

_PLACED = re.compile(r"(?P<file>.+?):(?P<line>\d+): (?P<message>.*)", re.DOTALL)


@dataclass(frozen=True)
class Met:
    """A rule and the ops that it meets.

    Attributes:
        origin: where the rule was written.
        match: what it asks for, as plain data.
        changes: what it changes, as plain data.
        ops: the names of the ops, in graph order.
        states: how many of them are computed how.
        passed_over: the targets that the rule is for, where the recipe's is another.
        optional: whether it may meet none.
    """

    origin: str
    match: Any
    changes: Any
    ops: tuple[str, ...]
    states: dict[str, int]
    passed_over: tuple[str, ...] = ()
    optional: bool = False

    @property
    def problem(self) -> str:
        """What is wrong, or ""."""
        if self.ops or self.optional or self.passed_over:
            return ""
        return (
            f"{self.origin}: the rule for {_flow(self.match)} matches no op of this model: fix it, drop it, "
            "or say optional: true."
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "origin": self.origin,
            "match": self.match,
            "changes": self.changes,
            "ops": list(self.ops),
            "states": self.states,
            "passed_over": bool(self.passed_over),
            "optional": self.optional,
        }


def match(traced: TracedModule, qconfig: QConfig) -> tuple[Met, ...]:
    """What each rule of ``qconfig`` meets in a traced module, in the order of the rules.

    Raises:
        QtraceError: for what `prepare` would refuse, except for rules that match nothing.
    """
    from qtrace.preparation.prepare import plan

    tolerant = tuple(rule.model_copy(update={"optional": True}) for rule in qconfig.rules)
    notes = plan(traced, qconfig.model_copy(update={"rules": tolerant})).notes
    found = []
    for rank, rule in enumerate(qconfig.rules):
        matched = [note for note in notes if rank in note.ranks]
        changes = {k: v for k, v in rule.to_dict().items() if k not in ("match", "optional", "backends")}
        others = () if rule.backends is None or qconfig.backend in rule.backends else rule.backends
        names, states = tuple(n.name for n in matched), dict(Counter(n.state for n in matched))
        found.append(Met(rule.origin, rule.match.to_dict(), changes, names, states, others, rule.optional))
    return tuple(found)


def table(met: Sequence[Met]) -> str:
    """A row for each rule."""
    from qtrace.graph.table import format_table

    rows = []
    for one in met:
        ops = ", ".join(one.ops[:3]) + (", ..." if len(one.ops) > 3 else "")
        if one.passed_over:
            ops = f"not for this target, only for {', '.join(one.passed_over)}"
        states = ", ".join(f"{count} {state}" for state, count in one.states.items())
        rows.append((one.origin, _flow(one.match), _flow(one.changes), len(one.ops), states, ops))
    return format_table(("rule", "match", "changes", "ops", "computed", "which"), rows, max_width=180)


def _flow(data: Any) -> str:
    from qtrace.config.tree import dump

    return dump(data, flow=True).strip()


def placed(sentence: str) -> dict[str, Any] | None:
    """``FILE:LINE: message`` as its parts; None for a sentence without a place."""
    found = _PLACED.fullmatch(sentence)
    if found is None:
        return None
    return {"file": found["file"], "line": int(found["line"]), "message": found["message"]}
