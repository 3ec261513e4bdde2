"""Rewriting a graph by rules: a pattern, a condition that can say why not, and a replacement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr
from megengine.traced_module.node import Node

from qtrace.errors import GraphError
from qtrace.graph.edit import GraphEditor
from qtrace.graph.pattern import Match, Matcher, Mismatch, Op
from qtrace.graph.walk import exprs

__all__ = ["RewriteRule", "RuleResult", "apply_rules"]


class RewriteRule(ABC):
    """A pattern, a condition, and what to put in its place."""

    pattern: Op

    @property
    def name(self) -> str:
        """How reports call the rule."""
        return type(self).__name__

    def check(self, match: Match) -> str | None:
        """None when the rule applies to ``match``, else the reason why not."""
        return None

    @abstractmethod
    def rewrite(self, match: Match, editor: GraphEditor) -> Mapping[Node, Node]:
        """Builds the replacement with ``editor``, placed ``after=match.exprs[0]``.

        Returns:
            Old output -> node to be used in its place by all who used it before; empty when nothing is to be
            rewired. What nobody uses any more is dropped.
        """


@dataclass(frozen=True)
class RuleResult:
    """What became of a rule at one place.

    Attributes:
        rule: the rule's name.
        where: the name of the node that the pattern was laid on.
        applied: whether it was rewritten.
        reason: why not; empty when applied.
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

    Within a sweep an expr belongs to one match at most, and a later match sees what the earlier ones put
    in. Each sweep is committed before the next rule starts, so put the larger of two patterns first.

    Args:
        traced: a flat traced module; it is edited in place.
        rules: in order of precedence.
        editor: makes the editor of a sweep.

    Returns:
        A result for each match, and for each place where a pattern's last call fits but not all of it.

    Raises:
        GraphError: when a rule replaces a node that is not an output of its match.
    """
    return [result for rule in rules for result in _sweep(traced, rule, editor)]


def _sweep(
    traced: TracedModule, rule: RewriteRule, make_editor: Callable[[TracedModule], GraphEditor]
) -> list[RuleResult]:
    results: list[RuleResult] = []
    taken: set[Expr] = set()
    gone: set[Expr] = set()
    with make_editor(traced) as editor:
        for expr in exprs(traced):
            if expr in taken or not expr.outputs:
                continue
            where = str(expr.outputs[0].name)
            matched = Matcher(traced.graph, taken, gone).match(rule.pattern, expr.outputs[0])
            if isinstance(matched, Mismatch):
                if matched.matched:
                    results.append(RuleResult(rule.name, where, False, str(matched)))
                continue
            reason = rule.check(matched)
            if reason is None:
                _rewrite(traced, rule, matched, editor)
                taken.update(matched.exprs)
                _add_gone(traced, matched.exprs, gone)
            results.append(RuleResult(rule.name, where, reason is None, reason or ""))
    return results


def _rewrite(traced: TracedModule, rule: RewriteRule, found: Match, editor: GraphEditor) -> None:
    # Only those who used the node before are rewired: the replacement itself may read it, at any depth.
    before = {node: list(node.users) for expr in found.exprs for node in expr.outputs}
    for old, new in rule.rewrite(found, editor).items():
        if old not in before:
            raise GraphError(f"rule {rule.name} replaces {old.name}, which is not an output of its match.")
        editor.replace_uses(old, new, users=before[old])
        graph_outputs = traced.graph.outputs
        graph_outputs[:] = [new if node is old else node for node in graph_outputs]


def _add_gone(traced: TracedModule, matched: Sequence[Expr], gone: set[Expr]) -> None:
    """Adds the matched exprs that nothing uses any more; they leave the graph at the commit."""
    left, size = list(matched), -1
    while len(left) != size:  # until a round finds no more: a use may come later in the list
        size = len(left)
        for expr in list(left):
            used = any(u not in gone for node in expr.outputs for u in node.users)
            returned = any(node is out for node in expr.outputs for out in traced.graph.outputs)
            if not (used or returned or expr._disable_remove):
                gone.add(expr)
                left.remove(expr)
