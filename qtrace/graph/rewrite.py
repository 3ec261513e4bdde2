"""Rewrites a graph by rules: a pattern, a condition that can give a reason, and a replacement."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr
from megengine.traced_module.node import Node

from qtrace.errors import GraphError
from qtrace.graph.edit import GraphEditor
from qtrace.graph.operations import OperationReader
from qtrace.graph.pattern import Compound, Matcher, Pattern, PatternMatch
from qtrace.graph.walk import exprs

_MOST_READINGS = 32  # ways to match one node that are checked


class RewriteRule(ABC):
    """A pattern, a condition on its match, and the replacement of the match.

    A sweep runs in graph order. It runs against it if ``from_outputs`` is set: then the larger of two matches
    wins.
    """

    pattern: Pattern
    from_outputs: bool = False

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
        partial: whether only the last calls of the pattern were matched.
        pieces: the names of the matched calls' outputs; empty for a partial match.
    """

    rule: str
    where: str
    applied: bool
    reason: str = ""
    partial: bool = field(default=False, compare=False)
    pieces: frozenset[str] = field(default=frozenset(), compare=False)


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
        A result for each match, and for each node at which only a pattern's last calls match, if the graph
        has all operations that the pattern needs.

    Raises:
        GraphError: when a rule replaces a node that is not an output of its match.
    """
    reader = OperationReader()
    return [result for rule in rules for result in _sweep(traced, rule, editor, reader)]


def _sweep(
    traced: TracedModule,
    rule: RewriteRule,
    make_editor: Callable[[TracedModule], GraphEditor],
    reader: OperationReader,
) -> list[RuleResult]:
    results: list[RuleResult] = []
    rewritten: set[Expr] = set()
    dead: set[Expr] = set()
    order = _candidates(traced, rule, reader)[:: -1 if rule.from_outputs else 1]
    index = getattr(rule.pattern, "output", None) or 0
    with contextlib.ExitStack() as stack:
        editor: GraphEditor | None = None  # opened by the first match: it costs time linear in the graph
        for expr in order:
            if expr in rewritten or len(expr.outputs) <= index:
                continue
            node = expr.outputs[index]
            name = str(node.name)
            matcher = Matcher(traced.graph, rewritten, dead, reader)
            match, reason = _first_match(rule, matcher, node)
            if match is None:
                if matcher.best is not None and matcher.best.matched:
                    results.append(RuleResult(rule.name, name, False, str(matcher.best), partial=True))
                continue
            pieces = frozenset(str(node.name) for e in match.exprs for node in e.outputs)
            if reason is None:
                editor = editor or stack.enter_context(make_editor(traced))
                _rewrite(traced, rule, match, editor)
                reader.clear()
                rewritten.update(match.exprs)
                _add_dead(traced, match.exprs, dead)
            results.append(RuleResult(rule.name, name, reason is None, reason or "", pieces=pieces))
    if rewritten:
        reader.clear()  # the commit of the editor has replaced nodes
    return results[:: -1 if rule.from_outputs else 1]


def _candidates(traced: TracedModule, rule: RewriteRule, reader: OperationReader) -> list[Expr]:
    """Lists the exprs at which the pattern of ``rule`` may end, in the order of the graph."""
    if not isinstance(rule.pattern, Compound):
        return exprs(traced)
    kinds = reader.kinds(exprs(traced))
    if not rule.pattern.needs() <= set(itertools.chain.from_iterable(kinds.values())):
        return []
    roots = rule.pattern.roots()
    return [expr for expr, names in kinds.items() if roots is None or not roots.isdisjoint(names)]


def _first_match(rule: RewriteRule, matcher: Matcher, node: Node) -> tuple[PatternMatch | None, str | None]:
    """Returns the first match that passes the rule's check, else the first match and why it does not pass."""
    refused: tuple[PatternMatch | None, str | None] = (None, None)
    for match in itertools.islice(matcher.matches(rule.pattern, node), _MOST_READINGS):
        reason = rule.check(match)
        if reason is None:
            return match, None
        if refused[0] is None:
            refused = match, reason
    return refused


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
