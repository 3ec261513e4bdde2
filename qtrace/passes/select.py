"""Which rule of a config meets which op: selectors by structure and by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qtrace import ops, plugins
from qtrace.backends import Backend
from qtrace.config import Match, QConfig, Rule, Spec
from qtrace.errors import ConfigError, QtraceError
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.types import Expr, Node, TracedModule
from qtrace.graph.walk import exprs, module_path
from qtrace.observers.base import Observer
from qtrace.ops import OpCall, Role
from qtrace.scheme import QScheme

__all__ = ["Choice", "choose"]


@dataclass(frozen=True)
class Choice:
    """What a config says about one op.

    Attributes:
        quantize: False keeps the op in float; None leaves it to the backend.
        activation: scheme of its input sites (and of its output where no consumer has a say).
        weight: scheme of its weight.
        activation_observer: for its activation sites.
        weight_observer: for its weight.
        fakequant: for all its sites.
        rules: origins of the rules that matched, in order.
    """

    quantize: bool | None
    activation: QScheme
    weight: QScheme
    activation_observer: Spec
    weight_observer: Spec
    fakequant: Spec
    rules: tuple[str, ...] = ()


def choose(
    traced: TracedModule, calls: dict[int, OpCall], qconfig: QConfig, backend: Backend
) -> dict[int, Choice]:
    """Applies the rules of ``qconfig`` in order; a later rule wins over an earlier one.

    Args:
        traced: a flat, expanded graph.
        calls: id of expr -> its reading.
        qconfig: the config.
        backend: gives the schemes that the rules change.

    Returns:
        id of expr -> choice, for every expr in ``calls``.

    Raises:
        ConfigError: for a rule that matches nothing or names an unknown op, or a scheme that the backend
            cannot run, with the rule's file and line.
    """
    selector = _Selector(traced, calls)
    base = _base(qconfig, backend)
    chosen = dict.fromkeys(calls, base)
    for rule in qconfig.rules:
        matched = selector.select(rule)
        if not matched:
            raise ConfigError(
                f"{rule.origin}: the rule {_text(rule.match)} matches no op of this graph: fix or drop it."
            )
        for key in matched:
            chosen[key] = _apply(chosen[key], rule, backend)
    return chosen


def _base(qconfig: QConfig, backend: Backend) -> Choice:
    activation, weight = backend.activation, backend.weight
    if qconfig.activation is not None:
        activation = qconfig.activation.apply(activation)
    if qconfig.weight is not None:
        weight = qconfig.weight.apply(weight)
    for sort, scheme in (("activation", activation), ("weight", weight)):
        _check(backend, sort, scheme, qconfig.origin)
    choice = Choice(
        None,
        activation,
        weight,
        qconfig.activation_observer,
        qconfig.weight_observer,
        qconfig.effective_fakequant,
    )
    _check_plugins(choice, qconfig.origin)
    return choice


def _apply(old: Choice, rule: Rule, backend: Backend) -> Choice:
    activation = rule.activation.apply(old.activation) if rule.activation else old.activation
    weight = rule.weight.apply(old.weight) if rule.weight else old.weight
    if rule.activation:
        _check(backend, "activation", activation, rule.origin)
    if rule.weight:
        _check(backend, "weight", weight, rule.origin)
    observers = rule.observers
    choice = Choice(
        old.quantize if rule.quantize is None else rule.quantize,
        activation,
        weight,
        (observers.activation if observers else None) or old.activation_observer,
        (observers.weight if observers else None) or old.weight_observer,
        rule.fakequant or old.fakequant,
        (*old.rules, rule.origin),
    )
    _check_plugins(choice, rule.origin)
    return choice


def _check(backend: Backend, sort: str, scheme: QScheme, origin: str) -> None:
    problem = backend.problem(sort, scheme)
    if problem is not None:
        raise ConfigError(
            f"{origin}: backend {backend.name} cannot run {sort} scheme {scheme.describe()}: {problem}."
        )


def _check_plugins(choice: Choice, origin: str) -> None:
    """Makes the observers and fake quants once, so that a wrong option is told with its place."""
    specs = (
        ("activations", choice.activation, choice.activation_observer),
        ("weights", choice.weight, choice.weight_observer),
    )
    try:
        for sort, scheme, spec in specs:
            plugins.resolve("qtrace.observers", spec.name, Observer)(scheme, **spec.options)
            fake = plugins.resolve("qtrace.fakequant", choice.fakequant.name, FakeQuant)
            fake(sort, scheme.replace(axis=None), **choice.fakequant.options)
    except QtraceError as error:
        raise ConfigError(f"{origin}: {error}") from error


def _text(match: Match) -> str:
    return str(match.to_dict())


class _Selector:
    """Answers structural questions about the ops of one graph; each answer is computed once."""

    def __init__(self, traced: TracedModule, calls: dict[int, OpCall]) -> None:
        self.traced, self.calls = traced, calls
        self.order = [e for e in exprs(traced) if id(e) in calls]
        self._above: dict[int, bool] | None = None
        self._below: dict[int, bool] | None = None

    def select(self, rule: Rule) -> list[int]:
        """The ids of the exprs that ``rule`` matches, in graph order."""
        match = rule.match
        keep = [e for e in self.order if self.calls[id(e)].role is not Role.SHAPE]
        if match.op is not None:
            keep = self._by_op(keep, _listed(match.op), rule.origin)
        if match.name is not None:
            keep = [e for e in keep if self._named(e, _listed(match.name))]
        if match.depthwise is not None:
            keep = [e for e in keep if self._depthwise(e) is match.depthwise]
        if match.position is not None:
            keep = [e for e in keep if self._at(e, match.position)]
        if match.before_output is not None:
            keep = [e for e in keep if self._before_output(e) is match.before_output]
        if match.subgraph is not None:
            inside = self._between(match.subgraph.from_, match.subgraph.to, rule.origin)
            keep = [e for e in keep if id(e) in inside]
        return [id(e) for e in keep]

    def _by_op(self, keep: list[Expr], kinds: Sequence[str], origin: str) -> list[Expr]:
        unknown = [k for k in kinds if k not in ops.kinds()]
        if unknown:
            raise ConfigError(f"{origin}: unknown op {unknown[0]!r}; known: {', '.join(ops.kinds())}.")
        return [e for e in keep if self.calls[id(e)].kind in kinds]

    def _named(self, expr: Expr, patterns: Sequence[str]) -> bool:
        names = [module_path(expr), *(n.name for n in expr.outputs)]
        return any(fnmatch.fnmatchcase(name, p) for p in patterns for name in names)

    def _depthwise(self, expr: Expr) -> bool | None:
        call = self.calls[id(expr)]
        if call.kind not in ("conv2d", "conv_transpose2d") or call.weight is None:
            return None
        return call.attrs["groups"] > 1 and int(call.weight.shape[2]) == 1

    def _at(self, expr: Expr, position: str) -> bool:
        if self.calls[id(expr)].role is not Role.COMPUTE:
            return False
        if position == "first":
            self._above = self._above or self._reach(self.order, forward=True)
            return not self._above[id(expr)]
        self._below = self._below or self._reach(list(reversed(self.order)), forward=False)
        return not self._below[id(expr)]

    def _reach(self, order: Iterable[Expr], forward: bool) -> dict[int, bool]:
        """For every op: whether a compute op lies before (forward) or behind it."""
        seen: dict[int, bool] = {}
        every = exprs(self.traced) if forward else list(reversed(exprs(self.traced)))
        for expr in every:
            if forward:
                near = [n.expr for n in expr.inputs]
            else:
                near = [u for n in expr.outputs for u in n.users]
            seen[id(expr)] = any(seen.get(id(e), False) or self._computes(e) for e in near)
        return seen

    def _computes(self, expr: Expr) -> bool:
        call = self.calls.get(id(expr))
        return call is not None and call.role is Role.COMPUTE

    def _before_output(self, expr: Expr) -> bool:
        """Whether nothing but moves and fused activations stands between the op and a graph output."""
        outputs = {id(n) for n in self.traced.graph.outputs}
        stack: list[Node] = list(expr.outputs)
        while stack:
            node = stack.pop()
            if id(node) in outputs:
                return True
            for user in node.users:
                call = self.calls.get(id(user))
                if call is not None and call.role in (Role.CARRY, Role.ACTIVATION, Role.NORM):
                    stack.extend(user.outputs)
        return False

    def _between(self, start: str, end: str, origin: str) -> set[int]:
        """The exprs on a way from node ``start`` to node ``end``, both ends included."""
        nodes = {n.name: n for e in exprs(self.traced) for n in e.outputs}
        nodes.update((n.name, n) for n in self.traced.graph.inputs)
        for name in (start, end):
            if name not in nodes:
                raise ConfigError(
                    f"{origin}: subgraph names the node {name!r}, which this graph does not have."
                )
        behind = _closure([nodes[start].expr], lambda e: [u for n in e.outputs for u in n.users])
        before = _closure([nodes[end].expr], lambda e: [n.expr for n in e.inputs])
        return behind & before


def _closure(start: list[Expr], near: object) -> set[int]:
    seen: set[int] = set()
    stack = list(start)
    while stack:
        expr = stack.pop()
        if id(expr) not in seen:
            seen.add(id(expr))
            stack.extend(near(expr))  # type: ignore[operator]
    return seen


def _listed(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value
