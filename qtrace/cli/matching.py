"""Matches the rules of a recipe with the ops of a model, for ``qtrace recipes check``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time they load MegEngine, which --help does without
    from qtrace.config import QConfig
    from qtrace.graph.types import TracedModule

__all__ = ["RuleMatch", "match_rules", "split_location", "table"]

_LOCATED = re.compile(r"(?P<file>.+?):(?P<line>\d+): (?P<message>.*)", re.DOTALL)


@dataclass(frozen=True)
class RuleMatch:
    """A rule and the ops that it matches.

    Attributes:
        origin: the location of the rule, such as ``my.yaml:12``.
        match: the conditions of the rule, as plain data.
        changes: the settings that the rule changes, as plain data.
        ops: the names of the ops, in graph order.
        states: the number of these ops by how they are computed.
        passed_over: the targets of the rule, if the recipe's target is not among them.
        optional: whether the rule may match no op.
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
        """The mistake in a sentence; "" if there is nmatch."""
        if self.ops or self.optional or self.passed_over:
            return ""
        return (
            f"{self.origin}: the rule for {_flow(self.match)} matches no op of this model: fix it, drop it, "
            "or say optional: true."
        )

    def to_dict(self) -> dict[str, Any]:
        """Converts the match to plain data."""
        return {
            "origin": self.origin,
            "match": self.match,
            "changes": self.changes,
            "ops": list(self.ops),
            "states": self.states,
            "passed_over": bool(self.passed_over),
            "optional": self.optional,
        }


def match_rules(traced: TracedModule, qconfig: QConfig) -> tuple[RuleMatch, ...]:
    """Matches each rule of ``qconfig`` with the ops of a traced module, in the order of the rules.

    Raises:
        QtraceError: when `prepare` would refuse the module for another reason than a rule without ops.
    """
    from qtrace.preparation.prepare import plan

    tolerant = tuple(rule.model_copy(update={"optional": True}) for rule in qconfig.rules)
    notes = plan(traced, qconfig.model_copy(update={"rules": tolerant})).notes
    matches = []
    for rank, rule in enumerate(qconfig.rules):
        matched = [note for note in notes if rank in note.ranks]
        changes = {k: v for k, v in rule.to_dict().items() if k not in ("match", "optional", "backends")}
        others = () if rule.backends is None or qconfig.backend in rule.backends else rule.backends
        names, states = tuple(n.name for n in matched), dict(Counter(n.state for n in matched))
        matches.append(
            RuleMatch(rule.origin, rule.match.to_dict(), changes, names, states, others, rule.optional)
        )
    return tuple(matches)


def table(matches: Sequence[RuleMatch]) -> str:
    """Formats ``matches`` as a table with one row per rule."""
    from qtrace.display import format_table
    from qtrace.errors import shorten_list

    rows = []
    for match in matches:
        ops = shorten_list(match.ops)
        if match.passed_over:
            ops = f"not for this target, only for {', '.join(match.passed_over)}"
        states = ", ".join(f"{count} {state}" for state, count in match.states.items())
        rows.append((match.origin, _flow(match.match), _flow(match.changes), len(match.ops), states, ops))
    return format_table(("rule", "match", "changes", "ops", "computed", "which"), rows, max_width=180)


def _flow(data: Any) -> str:
    from qtrace.config.tree import dump

    return dump(data, flow=True).strip()


def split_location(sentence: str) -> dict[str, Any] | None:
    """Splits ``FILE:LINE: message`` into its parts; None for a sentence without a location."""
    parts = _LOCATED.fullmatch(sentence)
    if parts is None:
        return None
    return {"file": parts["file"], "line": int(parts["line"]), "message": parts["message"]}
