"""Patterns over a traced graph, and the reasons why they do not match. ``rewrite.py`` applies them.

A pattern is a small tree of ``Op`` with ``Anything``, ``Const`` and ``Param`` at its leaves, matched from the
output towards the inputs:

    >>> conv = Op(M.Conv2d, Anything("x"), name="conv")
    >>> pattern = Op(F.relu, Op(M.BatchNorm2d, conv, name="bn"))
    >>> str(match(pattern, node))
    'bn_out: produced by Tensor.__add__, expected BatchNorm2d'

An object or a name that occurs twice in a pattern must be the same node both times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.module import Module
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError
from qtrace.gradients import plain
from qtrace.graph.operations import (
    CanonicalOp,
    OperationReader,
    StoredTensor,
    canonical_arguments,
    is_call_of_layer,
    read_layer,
    without_equal_sizes,
)
from qtrace.graph.types import (
    CallFunction,
    CallMethod,
    Constant,
    Expr,
    GetAttr,
    Input,
    Node,
    TensorNode,
    is_call_module,
)
from qtrace.graph.walk import op_label, output_index, owner, signature, users

Target = type[Module] | Callable[..., Any] | str | CanonicalOp
Condition = Callable[[Expr], "str | bool | None"]

UNSET = object()
"""The value of a pattern that is not bound."""


class Pattern:
    """A condition on a node or on a constant argument. ``name`` binds the node or argument in the match."""

    shared = False

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    @property
    def key(self) -> object:
        """Identity of the pattern: patterns with equal keys stand for the same value."""
        return self.name if self.name is not None else id(self)

    def mismatch(self, value: Any) -> str | None:
        """Returns why ``value``, a node or a constant argument, does not match; None if it matches."""
        return None


class Anything(Pattern):
    """Any node, or any constant argument."""


class Const(Pattern):
    """A constant Python argument; it must equal ``value`` if there is one."""

    def __init__(self, value: Any = UNSET, name: str | None = None) -> None:
        super().__init__(name)
        self.value = value

    def mismatch(self, value: Any) -> str | None:
        """Returns why ``value`` is not the constant."""
        if isinstance(value, (Node, StoredTensor)):
            return "is computed, expected a constant argument"
        if self.value is not UNSET and not _equal(self.value, value):
            return f"is an argument that must be {self.value!r}"
        return None


class Param(Pattern):
    """A parameter or buffer that the graph reads. Other exprs may read it as well."""

    def mismatch(self, value: Any) -> str | None:
        """Returns why ``value`` is not a parameter."""
        if isinstance(value, StoredTensor):
            return None
        if not isinstance(value, TensorNode):
            return "is a constant argument, expected a parameter"
        if not isinstance(value.expr, GetAttr):
            return f"produced by {op_label(value.expr)}, expected a parameter"
        return None


class Compound(Pattern):
    """A pattern that matches its parts itself; ``algebra.py`` has the patterns of sums and products."""

    def roots(self) -> frozenset[str] | None:
        """Returns the kinds of operations that may end a match; None if any call may."""
        return None

    def needs(self) -> frozenset[str]:
        """Returns kinds of operations of each of which every match has one."""
        return frozenset()

    def matches(self, matcher: Matcher, value: Any, state: PartialMatch) -> Iterator[PartialMatch]:
        """Yields the ways in which ``value`` matches; says ``matcher.fail`` where it does not."""
        raise NotImplementedError


class Op(Pattern):
    """A call.

    Args:
        target: a module class, a function, the name of a Tensor method, or a `CanonicalOp`. A tuple of these
            stands for any of them, None for every call. A subclass of a class does not match, since it may
            compute something else. A layer and the function that it calls are one: `M.Conv2d` and `F.conv2d`
            on stored parameters match either way, and so do `M.BatchNorm2d` and `F.nn.batch_norm` in eval
            mode.
        *inputs: patterns of the leading arguments without a called module; lists and tuples are opened.
            Every tensor argument needs a pattern, but the parameters of a layer whose class is the target.
            A call without patterns may have any arguments. For a `CanonicalOp` these are the patterns of all
            its arguments, in the order of its function. What stands for a parameter of a called layer is
            bound to its node, or to a `StoredTensor`, which `GraphEditor` takes like a node.
        name: binds the call's output in the match.
        commutative: whether the two inputs may be in either order.
        shared: whether exprs outside of the match may use the output.
        output: the index of the output that the pattern stands for; None for any.
        args: arguments by parameter name, or attributes of a called module, and the values they must have.
        when: another condition on the expr: returns None or True if it holds, else False or the reason.
    """

    def __init__(
        self,
        target: Target | tuple[Target, ...] | None,
        *inputs: Pattern,
        name: str | None = None,
        commutative: bool = False,
        shared: bool = False,
        output: int | None = None,
        args: Mapping[str, Any] | None = None,
        when: Condition | None = None,
    ) -> None:
        super().__init__(name)
        if commutative and len(inputs) != 2:
            raise ValueError(f"a commutative pattern has two inputs, not {len(inputs)}.")
        self.targets = None if target is None else target if isinstance(target, tuple) else (target,)
        self.inputs = inputs
        self.commutative = commutative
        self.shared = shared
        self.output = output
        self.args = dict(args or {})
        self.when = when
        self.is_canonical = self.targets is not None and isinstance(self.targets[0], CanonicalOp)


class Outputs(Compound):
    """Several calls whose results may all be used outside of the match.

    The first is matched where the search stands, and the others among the calls that read what is matched.

    Args:
        calls: a pattern of each result; ``shared``, if there are several.
    """

    def __init__(self, calls: Sequence[Op]) -> None:
        super().__init__()
        self.calls = tuple(dict.fromkeys(calls))
        self.outputs, self.output = tuple(calls), calls[0].output

    def is_connected(self) -> bool:
        """Returns whether each call shares a tensor with calls before it."""
        known: set[object] = set()
        for call in self.calls:
            keys = set(_tensor_keys(call))
            if known and known.isdisjoint(keys):
                return False
            known |= keys
        return True

    def matches(self, matcher: Matcher, value: Any, state: PartialMatch) -> Iterator[PartialMatch]:
        """Yields the ways in which ``value`` is the first result, and other nodes are the others."""
        for inner in matcher.match_value(self.calls[0], value, state):
            for full in self._others(self.calls[1:], matcher, inner):
                if len(self.calls) > 1 and self._needs_itself(matcher, full):
                    matcher.fail(
                        show(value), "another call of the match needs it through calls outside", full
                    )
                else:
                    yield full

    def _others(self, calls: Sequence[Op], matcher: Matcher, state: PartialMatch) -> Iterator[PartialMatch]:
        if not calls:
            yield state
            return
        taken = [state.value(call) for call in self.calls if call is not calls[0]]
        for node in _nodes_for(calls[0], state):
            if node not in taken:
                for inner in matcher.match_value(calls[0], node, state):
                    yield from self._others(calls[1:], matcher, inner)

    def _needs_itself(self, matcher: Matcher, state: PartialMatch) -> bool:
        """Returns whether calls outside lead from a result to another call of the match."""
        inside, seen = set(state.exprs), set(matcher.dead)
        results = [state.value(call) for call in self.calls]
        ahead = [user for node in results for user in users(node) if user not in inside]
        while ahead:
            expr = ahead.pop()
            if expr in inside:
                return True
            if expr not in seen:
                seen.add(expr)
                ahead += [user for node in expr.outputs for user in users(node)]
        return False


def _tensor_keys(pattern: Pattern) -> Iterator[object]:
    """Yields the keys of a pattern and of all below it that are no constants."""
    if not isinstance(pattern, Const):
        yield pattern.key
    for each in getattr(pattern, "inputs", ()):
        yield from _tensor_keys(each)


def _nodes_for(pattern: Pattern, state: PartialMatch) -> list[Node]:
    """Returns the nodes that may match a pattern: those that read what is bound below it."""
    bound = state.value(pattern)
    if bound is not UNSET:
        return [bound] if isinstance(bound, Node) else []
    for each in getattr(pattern, "inputs", ()):
        readers = [user for node in _nodes_for(each, state) for user in users(node)]
        if readers:
            return list(dict.fromkeys(node for user in readers for node in user.outputs))
    return []


@dataclass(frozen=True)
class PatternMatch:
    """The node that a pattern matches, the calls (the first produces ``node``), and the named values.

    Attributes:
        outputs: the nodes of all results: of an `Outputs`; ``node`` for any other pattern.
    """

    node: TensorNode
    exprs: tuple[Expr, ...]
    bound: Mapping[str, Any]
    outputs: tuple[TensorNode, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns what is bound to ``name``, or ``default``."""
        return self.bound.get(name, default)

    def expr(self, name: str) -> Expr:
        """Returns the expr that produces the node bound to ``name``."""
        return self.bound[name].expr


@dataclass(frozen=True)
class Mismatch:
    """The reason why the attempt with the most matched calls is no match; false as a condition."""

    where: str
    reason: str
    matched: int

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class PartialMatch:
    """An immutable partial match, so that another order of inputs can start from it again."""

    bound: tuple[tuple[Pattern, Any], ...] = ()
    exprs: tuple[Expr, ...] = ()

    def bind(self, pattern: Pattern, value: Any, *exprs: Expr) -> PartialMatch:
        """Returns this match with ``pattern`` bound to ``value``, and with ``exprs`` that were matched."""
        return PartialMatch((*self.bound, (pattern, value)), (*self.exprs, *exprs))

    def value(self, pattern: Pattern) -> Any:
        """Returns what ``pattern`` is bound to, or UNSET."""
        return next((v for p, v in self.bound if p.key == pattern.key), UNSET)


def match(pattern: Pattern, node: Node) -> PatternMatch | Mismatch:
    """Matches ``pattern`` with the expr that produces ``node`` and with the exprs before it.

    A node inside of the match must not be a graph output or be used outside unless it is ``shared``.

    Raises:
        GraphError: when ``node`` does not belong to a graph.
    """
    if node.top_graph is None:
        raise GraphError(f"{node.name} does not belong to a graph.")
    return Matcher(node.top_graph).match(pattern, node)


class Matcher:
    """Searches one match in a graph that is being rewritten; call ``match`` for any other graph.

    Args:
        graph: the graph of the node; new nodes refer to their graph only after the commit.
        rewritten: exprs of earlier matches.
        dead: exprs that nothing uses any more, though lists of users still contain them.
        reader: reads operations for several matchers of a graph that does not change between them.
    """

    def __init__(
        self,
        graph: InternalGraph,
        rewritten: Set[Expr] = frozenset(),
        dead: Set[Expr] = frozenset(),
        reader: OperationReader | None = None,
    ) -> None:
        self.graph, self.rewritten, self.dead = graph, rewritten, dead
        self.reader = reader or OperationReader()
        self.best: Mismatch | None = None  # of the attempt with the most matched calls

    def match(self, pattern: Pattern, node: Node) -> PatternMatch | Mismatch:
        """Returns the first match of ``pattern`` at ``node``, or the reason why there is none."""
        first = next(self.matches(pattern, node), None)
        assert first is not None or self.best is not None
        return first or self.best  # type: ignore[return-value]

    def matches(self, pattern: Pattern, node: Node) -> Iterator[PatternMatch]:
        """Yields every match of ``pattern`` at ``node``; afterwards ``best`` is why others are none."""
        for state in self.match_value(pattern, node, PartialMatch()):
            problem = self._used_outside(node, state)
            if problem is None:
                named = {p.name: v for p, v in state.bound if p.name is not None}
                results = tuple(state.value(call) for call in getattr(pattern, "outputs", ()))
                yield PatternMatch(node, state.exprs, named, results or (node,))
            else:
                self.fail(*problem, state)

    def fail(self, where: str, reason: str, state: PartialMatch) -> None:
        """Notes why the match at ``where`` fails; the attempt with the most matched calls counts."""
        if self.best is None or len(state.exprs) > self.best.matched:
            self.best = Mismatch(where, reason, len(state.exprs))

    def match_value(self, pattern: Pattern, value: Any, state: PartialMatch) -> Iterator[PartialMatch]:
        """Yields the ways in which ``value`` matches ``pattern``."""
        bound = state.value(pattern)
        if bound is not UNSET:
            if _equal(bound, value):
                yield state
            else:
                self.fail(show(value), f"differs from {show(bound)}, but must be the same", state)
        elif isinstance(pattern, Compound):
            yield from pattern.matches(self, value, state)
        elif isinstance(pattern, Op):
            yield from self._match_call(pattern, value, state)
        else:
            reason = pattern.mismatch(value)
            if reason is None:
                yield state.bind(pattern, value)
            else:
                self.fail(show(value), reason, state)

    def _match_call(self, pattern: Op, value: Any, state: PartialMatch) -> Iterator[PartialMatch]:
        expr = value.expr if isinstance(value, Node) else None
        reason = _call_mismatch(pattern, expr)
        if reason is None and expr in self.rewritten:
            reason = f"{op_label(expr)} was rewritten already"
        if reason is None and pattern.output not in (None, output_index(value)):
            reason = f"is another output of {op_label(expr)} than the pattern needs"
        leaves = [] if reason is not None else _leaves(pattern, expr)
        if reason is None and pattern.inputs:
            reason = _count_mismatch(pattern, leaves)
        if reason is not None:
            self.fail(show(value), reason, state)
            return
        inner = state.bind(pattern, value, expr)
        yield from self._match_values(pattern.inputs, leaves, inner)
        if pattern.commutative:
            yield from self._match_values(pattern.inputs, [leaves[1], leaves[0]], inner)

    def _match_values(
        self, patterns: Sequence[Pattern], values: Sequence[Any], state: PartialMatch
    ) -> Iterator[PartialMatch]:
        if not patterns:
            yield state
            return
        for inner in self.match_value(patterns[0], values[0], state):
            yield from self._match_values(patterns[1:], values[1:], inner)

    def _used_outside(self, root: Node, state: PartialMatch) -> tuple[str, str] | None:
        inside = set(state.exprs)
        shared = {v.expr for p, v in state.bound if p.shared}
        condition = "the pattern needs it to be used only inside"
        for expr in state.exprs:
            if expr is root.expr or expr in shared:
                continue
            for node in expr.outputs:
                if any(out is node for out in self.graph.outputs):
                    return node.name, f"is a graph output; {condition}"
                readers = [u for u in users(node) if u not in self.dead]
                if any(u not in inside for u in readers):
                    names = ", ".join(show(u.outputs[0]) if u.outputs else op_label(u) for u in readers)
                    return node.name, f"has {len(readers)} users ({names}); {condition}"
        return None


def _call_mismatch(pattern: Op, expr: Expr | None) -> str | None:
    """Returns why the call ``expr`` does not match ``pattern`` apart from its inputs; None if it matches."""
    expected = "a call" if pattern.targets is None else " or ".join(map(_target_text, pattern.targets))
    if expr is None:
        return f"is a constant argument, expected {expected}"
    if isinstance(expr, Input):
        return f"is a graph input, expected {expected}"
    if isinstance(expr, (GetAttr, Constant)):
        return f"is a {op_label(expr)}, expected {expected}"
    if pattern.targets is not None and not any(_is_target(expr, t) for t in pattern.targets):
        return f"produced by {op_label(expr)}, expected {expected}"
    for key, expected_value in pattern.args.items():
        actual = _argument(expr, key)
        if actual is UNSET:
            return f"{op_label(expr)} has no argument {key}"
        if not _equal(*(without_equal_sizes({key: each})[key] for each in (actual, expected_value))):
            return f"argument {key} of {op_label(expr)} is {show(actual)}, expected {show(expected_value)}"
    verdict = True if pattern.when is None else pattern.when(expr)
    if verdict is None or verdict is True:
        return None
    return verdict or f"a condition on {op_label(expr)} does not hold"


def _is_target(expr: Expr, target: Target) -> bool:
    if isinstance(target, CanonicalOp):
        return target.is_called_by(expr)
    if isinstance(target, str):
        return isinstance(expr, CallMethod) and not is_call_module(expr) and expr.method == target
    if isinstance(target, type):
        return type(owner(expr)) is target or is_call_of_layer(expr, target)
    if is_call_module(expr):
        layer = read_layer(expr)
        return layer is not None and layer.function == plain(target)
    return isinstance(expr, CallFunction) and plain(expr.func) == plain(target)


def _plain(target: Target) -> Any:
    return None if isinstance(target, (type, str, CanonicalOp)) else plain(target)


def _target_text(target: Target) -> str:
    if isinstance(target, CanonicalOp):
        return target.text
    if isinstance(target, str):
        return f"Tensor.{target}"
    if isinstance(target, type):
        return target.__name__
    prefix = "F" if target.__module__.startswith("megengine.functional") else target.__module__
    return f"{prefix}.{target.__qualname__}"


def _argument(expr: Expr, key: str) -> Any:
    """Returns the argument with the name ``key``, or the attribute of the called module."""
    module = owner(expr)
    if module is not None:
        attribute = getattr(module, key, UNSET)
        if attribute is not UNSET:
            return attribute
    try:
        called = type(module).forward if module is not None else expr._get_func()
        bound = signature(called).bind(*expr.args, **expr.kwargs)
    except (TypeError, ValueError, AttributeError, NotImplementedError):  # built in, or an Apply
        return UNSET
    bound.apply_defaults()
    return bound.arguments.get(key, UNSET)


def _leaves(pattern: Op, expr: Expr) -> list[Any]:
    """Returns nodes and constants of the arguments in order, without a called module; opens containers."""
    if pattern.is_canonical:
        return canonical_arguments(expr)
    layer = read_layer(expr)
    if layer is not None and any(t == layer.function for t in map(_plain, pattern.targets or ())):
        return list(layer.args)
    if any(isinstance(t, type) and is_call_of_layer(expr, t) for t in pattern.targets or ()):
        return [expr.args[0]]
    leaves = list(expr.inputs)
    for index, value in expr.const_val or ():
        leaves.insert(index, value)
    return leaves[1:] if is_call_module(expr) else leaves


def _count_mismatch(pattern: Op, leaves: list[Any]) -> str | None:
    expected = len(pattern.inputs)
    if len(leaves) < expected or (pattern.is_canonical and len(leaves) > expected):
        return f"has {len(leaves)} arguments, the pattern has {expected}"
    if any(isinstance(leaf, (Node, StoredTensor)) for leaf in leaves[expected:]):
        count = sum(isinstance(leaf, (Node, StoredTensor)) for leaf in leaves)
        return f"has {count} tensor arguments, the pattern has {expected}"
    return None


def _equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if isinstance(left, StoredTensor) or isinstance(right, StoredTensor):
        stored, other = (left, right) if isinstance(left, StoredTensor) else (right, left)
        return stored == other or (isinstance(other, Node) and stored.is_read_by(other))
    if isinstance(left, (Node, Tensor, Module)) or isinstance(right, (Node, Tensor, Module)):
        return False
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.array_equal(left, right)
    return bool(left == right)


def show(value: Any) -> str:
    """Returns the name of a node, or the text of a constant."""
    return str(value.name) if isinstance(value, Node) else repr(value)
