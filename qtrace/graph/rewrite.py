"""Rewrites a graph by rules: a pattern, a condition that can give a reason, and a replacement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr
from megengine.traced_module.node import Node

from qtrace.errors import GraphError
from qtrace.graph.edit import GraphEditor
from qtrace.graph.pattern import Matcher, Mismatch, Op, PatternMatch
from qtrace.graph.walk import exprs

__all__ = ["RewriteRule", "RuleResult", "apply_rules"]


class RewriteRule(ABC):
    """A pattern, a condition on its match, and the replacement of the match."""

    pattern: Op

    @property
    def name(self) -> str:
        """Name of the rule in reports."""
        return type(self).__name__

    def check(self, match: PatternMatch) -> str | None:
        """Returns None if the rule applies to ``match``, else the reason why not."""
        return None

    @abstractmethod
    def rewrite(self, match: PatternMatch, editor: GraphEditor) -> Mapping[Node, Node]:
        """Builds the replacement with ``editor``, placed ``after=match.exprs[0]``.

        Returns:
            Old output -> the node that replaces it for all its users; empty to rewire nothing. Exprs that
            are not used any more are dropped.
        """


@dataclass(frozen=True)
class RuleResult:
    """The result of a rule at one node.

    Attributes:
        rule: the rule's name.
        where: the name of the node at which the pattern was matched.
        applied: whether the match was rewritten.
        reason: why it was not rewritten; "" if it was.
    """

    rule: str
    where: str
    applied: bool
    reason: str = ""


def apply_rules(
    traced: TracedModule,
    rules: Sequence[RewriteRule],
    editor: Callable[[TracedModule], GraphEditor] = GraphEditor,
) -> list[RuleResult]:
    """Applies the rules one after the other, each in one sweep in graph order.

    Within a sweep an expr belongs to at most one match, and a later match sees the replacements of earlier
    ones. Each sweep is committed before the next rule starts, so put the larger of two patterns first.

    Args:
        traced: a flat traced module; it is edited in place.
        rules: in order of precedence.
        editor: builds the editor of a sweep.

    Returns:
        A result for each match, and for each node at which only a pattern's last calls match.

    Raises:
        GraphError: when a rule replaces a node that is not an output of its match.
    """
    return [result for rule in rules for result in _sweep(traced, rule, editor)]


def _sweep(
    traced: TracedModule, rule: RewriteRule, make_editor: Callable[[TracedModule], GraphEditor]
) -> list[RuleResult]:
    results: list[RuleResult] = []
    rewritten: set[Expr] = set()
    dead: set[Expr] = set()
    with make_editor(traced) as editor:
        for expr in exprs(traced):
            if expr in rewritten or not expr.outputs:
                continue
            name = str(expr.outputs[0].name)
            matched = Matcher(traced.graph, rewritten, dead).match(rule.pattern, expr.outputs[0])
            if isinstance(matched, Mismatch):
                if matched.matched:
                    results.append(RuleResult(rule.name, name, False, str(matched)))
                continue
            reason = rule.check(matched)
            if reason is None:
                _rewrite(traced, rule, matched, editor)
                rewritten.update(matched.exprs)
                _add_dead(traced, matched.exprs, dead)
            results.append(RuleResult(rule.name, name, reason is None, reason or ""))
    return results


def _rewrite(traced: TracedModule, rule: RewriteRule, match: PatternMatch, editor: GraphEditor) -> None:
    # Only the old users of a node are rewired: the replacement itself may read the node, at any depth.
    old_users = {node: list(node.users) for expr in match.exprs for node in expr.outputs}
    for old, new in rule.rewrite(match, editor).items():
        if old not in old_users:
            raise GraphError(f"rule {rule.name} replaces {old.name}, which is not an output of its match.")
        editor.replace_uses(old, new, users=old_users[old])
        graph_outputs = traced.graph.outputs
        graph_outputs[:] = [new if node is old else node for node in graph_outputs]


def _add_dead(traced: TracedModule, matched: Sequence[Expr], dead: set[Expr]) -> None:
    """Adds to ``dead`` the matched exprs that nothing uses any more; the commit drops them."""
    live, count = list(matched), -1
    while len(live) != count:  # until a round finds no more: a use may come later in the list
        count = len(live)
        for expr in list(live):
            used = any(u not in dead for node in expr.outputs for u in node.users)
            returned = any(node is out for node in expr.outputs for out in traced.graph.outputs)
            if not (used or returned or expr._disable_remove):
                dead.add(expr)
                live.remove(expr)
