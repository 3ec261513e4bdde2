"""Structural questions about the ops of one graph, as the rules of a config ask them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from qtrace import ops
from qtrace.config import Match, Rule
from qtrace.errors import ConfigError
from qtrace.graph.dataflow import static_nodes
from qtrace.graph.types import Expr, Node, TracedModule
from qtrace.graph.walk import exprs, module_path, users
from qtrace.ops import OpCall, Role

__all__ = ["Selector", "tail"]

_PASSED = (Role.CARRY, Role.CONCAT, Role.ACTIVATION, Role.NORM)
_SCALED = ("add", "sub", "mul", "div")


class Selector:
    """Selects the ops of a graph that a rule matches; each structural answer is computed once.

    Args:
        traced: a flat, expanded graph.
        calls: expr -> its reading.
    """

    def __init__(self, traced: TracedModule, calls: dict[Expr, OpCall]) -> None:
        self.traced, self.calls = traced, calls
        self.every = exprs(traced)
        self.order = [e for e in self.every if e in calls]

    def select(self, rule: Rule) -> list[Expr]:
        """The exprs that ``rule`` matches, in graph order."""
        match = rule.match
        keep = [e for e in self.order if self.calls[e].role is not Role.SHAPE]
        if match.op is not None:
            keep = self._by_op(keep, match.op, rule.origin)
        if match.name is not None:
            keep = [e for e in keep if _named(e, match.name)]
        for wanted, answer in self._structural(match, rule.origin):
            keep = [e for e in keep if answer(e) is wanted]
        if match.subgraph is not None:
            inside = self._between(match.subgraph.from_, match.subgraph.to, rule.origin)
            keep = [e for e in keep if e in inside]
        return keep

    def _structural(self, match: Match, origin: str) -> list[tuple[bool, Callable[[Expr], bool | None]]]:
        """The questions that ``match`` asks, each with the answer that it wants."""
        questions: list[tuple[bool, Callable[[Expr], bool | None]]] = []
        if match.depthwise is not None:
            questions.append((match.depthwise, self._depthwise))
        if match.position is not None:
            members = {"first": self._first, "last": self._last, "tail": self._tail}[match.position]
            questions.append((True, lambda e: e in members))
        if match.before_output is not None:
            questions.append((match.before_output, self._before_output))
        if match.gate is not None:
            questions.append((match.gate, self._gates))
        if match.shared is not None:
            questions.append((match.shared, self._shared))
        for kinds, forward in ((match.feeds, True), (match.follows, False)):
            if kinds is not None:
                neighbours = self._near(_known(kinds, origin), forward)
                questions.append((True, lambda e, near=neighbours: e in near))  # type: ignore[misc]
        return questions

    def _by_op(self, keep: list[Expr], kinds: Sequence[str], origin: str) -> list[Expr]:
        wanted = _known(kinds, origin)
        return [e for e in keep if self.calls[e].kind in wanted]

    def _depthwise(self, expr: Expr) -> bool | None:
        call = self.calls[expr]
        if call.kind not in ("conv2d", "conv_transpose2d") or call.weight is None:
            return None
        return call.attrs["groups"] > 1 and int(call.weight.shape[2]) == 1

    # -- positions ----------------------------------------------------------------------------------

    @cached_property
    def _first(self) -> set[Expr]:
        above = _reach(self.every, self._computes, lambda e: [n.expr for n in e.inputs])
        return {e for e in self.order if self._computes(e) and e not in above}

    @cached_property
    def _last(self) -> set[Expr]:
        below = _reach(reversed(self.every), self._computes, self._readers)
        return {e for e in self.order if self._computes(e) and e not in below}

    @cached_property
    def _tail(self) -> set[Expr]:
        return tail(self.every, self.calls)

    def _computes(self, expr: Expr) -> bool:
        call = self.calls.get(expr)
        return call is not None and call.role is Role.COMPUTE

    @staticmethod
    def _readers(expr: Expr) -> list[Expr]:
        return [u for n in expr.outputs for u in n.users]

    def _before_output(self, expr: Expr) -> bool:
        """Whether nothing but moves and fused activations stands between the op and a graph output."""
        outputs = set(self.traced.graph.outputs)
        stack: list[Node] = list(expr.outputs)
        while stack:
            node = stack.pop()
            if node in outputs:
                return True
            for user in node.users:
                call = self.calls.get(user)
                if call is not None and call.role in (Role.CARRY, Role.ACTIVATION, Role.NORM):
                    stack.extend(user.outputs)
        return False

    # -- neighbours ---------------------------------------------------------------------------------

    def _near(self, kinds: frozenset[str], forward: bool) -> set[Expr]:
        """The exprs next to an op of one of ``kinds``: before it, or behind it, past what `_seen_through`."""
        neighbours: set[Expr] = set()
        for expr in reversed(self.every) if forward else self.every:
            near = self._readers(expr) if forward else [n.expr for n in expr.inputs]
            for other in near:
                call = self.calls.get(other)
                if call is None:
                    continue
                if call.kind in kinds or (other in neighbours and self._seen_through(call)):
                    neighbours.add(expr)
        return neighbours

    @cached_property
    def _static(self) -> set[Node]:
        return static_nodes(self.traced)

    def _seen_through(self, call: OpCall) -> bool:
        """Whether ``call`` moves values, or changes each by what parameters and numbers alone give."""
        if call.role in _PASSED:
            return True
        computed = [n for n in call.inputs if n not in self._static]
        return call.kind in _SCALED and len(computed) == 1

    def _gates(self, expr: Expr) -> bool:
        """Whether the result, moved or not, has one value a channel and multiplies a map of many."""
        stack: list[Node] = list(expr.outputs)
        while stack:
            node = stack.pop()
            for user in users(node):
                call = self.calls.get(user)
                if call is None:
                    continue
                if call.role is Role.CARRY:
                    stack.extend(user.outputs)
                elif call.kind == "mul" and any(_is_gate(node, other) for other in call.inputs):
                    return True
        return False

    def _shared(self, expr: Expr) -> bool | None:
        call = self.calls[expr]
        if call.weight is None:
            return None
        readers = [u for u in users(call.weight) if u in self.calls]
        return len(readers) > 1

    def _between(self, start: str, end: str, origin: str) -> set[Expr]:
        """The exprs on a way from node ``start`` to node ``end``, both ends included."""
        nodes = {n.name: n for e in self.every for n in e.outputs}
        nodes.update((n.name, n) for n in self.traced.graph.inputs)
        for name in (start, end):
            if name not in nodes:
                raise ConfigError(
                    f"{origin}: subgraph names the node {name!r}, which this graph does not have."
                )
        behind = closure([nodes[start].expr], self._readers)
        before = closure([nodes[end].expr], lambda e: [n.expr for n in e.inputs])
        return behind & before


def tail(order: Sequence[Expr], calls: dict[Expr, OpCall]) -> set[Expr]:
    """The ops after the last computing ones: no value of theirs reaches a computing op.

    Boxes that choose where another op reads (``roi_align``) are no values for it. What can be fused into
    the op before it (an activation, a norm) belongs to that op.

    Args:
        order: the exprs of a flat graph.
        calls: expr -> its reading.

    Returns:
        The exprs of these ops.
    """
    feeding: set[Node] = set()  # the nodes whose values some computing op depends on
    behind: set[Expr] = set()
    for expr in reversed(order):
        call = calls.get(expr)
        alive = any(n in feeding for n in expr.outputs)
        computes = call is not None and call.role is Role.COMPUTE
        if alive or computes:
            read = expr.inputs if call is None else (*call.inputs, *filter(None, (call.weight, call.bias)))
            feeding.update(read)
        elif call is not None:
            behind.add(expr)
    for expr in order:
        call = calls.get(expr)
        fusable = call is not None and call.role in (Role.ACTIVATION, Role.NORM)
        if fusable and expr in behind and expr.inputs[-1].expr not in behind:
            behind.remove(expr)
    return behind


def closure(start: Iterable[Expr], near: Callable[[Expr], Iterable[Expr]]) -> set[Expr]:
    """The exprs that can be reached from ``start``, itself included."""
    seen: set[Expr] = set()
    stack = list(start)
    while stack:
        expr = stack.pop()
        if expr not in seen:
            seen.add(expr)
            stack.extend(near(expr))
    return seen


def _reach(
    order: Iterable[Expr], is_source: Callable[[Expr], bool], near: Callable[[Expr], Iterable[Expr]]
) -> set[Expr]:
    """The exprs that have a source among those ``near`` them, directly or not."""
    reached: set[Expr] = set()
    for expr in order:
        if any(e in reached or is_source(e) for e in near(expr)):
            reached.add(expr)
    return reached


def _is_gate(gate: Node, other: Node) -> bool:
    one, many = gate.shape, other.shape
    if one is None or many is None or len(one) != 4 or len(many) != 4:
        return False
    return tuple(one[2:]) == (1, 1) and tuple(many[2:]) != (1, 1)


def _known(kinds: Sequence[str], origin: str) -> frozenset[str]:
    unknown = [k for k in kinds if k not in ops.kinds()]
    if unknown:
        raise ConfigError(f"{origin}: unknown op {unknown[0]!r}; known: {', '.join(ops.kinds())}.")
    return frozenset(kinds)


def _named(expr: Expr, patterns: Sequence[str]) -> bool:
    names = [module_path(expr), *(n.name for n in expr.outputs)]
    return any(fnmatch.fnmatchcase(name, p) for p in patterns for name in names)
