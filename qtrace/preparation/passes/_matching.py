"""Matches the rules and the region of a config with the ops of a graph: by kind, name and structure."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from qtrace import ops
from qtrace.config import Match, Region, Rule
from qtrace.errors import ConfigError
from qtrace.graph.dataflow import static_nodes
from qtrace.graph.interface import read_interface
from qtrace.graph.origin import read_origin
from qtrace.graph.types import Constant, Expr, GetAttr, Node, TracedModule
from qtrace.graph.walk import exprs, module_path, users
from qtrace.ops import OpCall, Role

__all__ = ["Selector", "computes", "find_region", "tail"]

_TRANSPARENT_ROLES = (Role.CARRY, Role.CONCAT, Role.ACTIVATION, Role.NORM)
_SCALING_KINDS = ("add", "sub", "mul", "div")


class Selector:
    """Selects the ops of a graph that a rule matches; each structural property is computed once.

    Args:
        traced: a flat, expanded graph.
        calls: expr -> the `OpCall` that it is read as.
    """

    def __init__(self, traced: TracedModule, calls: dict[Expr, OpCall]) -> None:
        self.traced, self.calls = traced, calls
        self.exprs = exprs(traced)
        self.ops = [e for e in self.exprs if e in calls]

    def select(self, rule: Rule) -> list[Expr]:
        """Returns the exprs that ``rule`` matches, in graph order."""
        match = rule.match
        selected = [e for e in self.ops if self.calls[e].role is not Role.SHAPE]
        if match.op is not None:
            kinds = _check_kinds(match.op, rule.origin)
            selected = [e for e in selected if self.calls[e].kind in kinds]
        if match.name is not None:
            named = {e for e, names in self._names.items() if _any_matches(match.name, names)}
            selected = [e for e in selected if e in named]
        for value, predicate in self._predicates(match, rule.origin):
            selected = [e for e in selected if predicate(e) is value]
        if match.subgraph is not None:
            inside = self._between(match.subgraph.from_, match.subgraph.to, rule.origin)
            selected = [e for e in selected if e in inside]
        return selected

    @cached_property
    def _names(self) -> dict[Expr, list[str]]:
        return _expr_names(self.traced)

    def _predicates(self, match: Match, origin: str) -> list[tuple[bool, Callable[[Expr], bool | None]]]:
        """Lists the structural predicates of ``match``, each with the value that it must have."""
        predicates: list[tuple[bool, Callable[[Expr], bool | None]]] = []
        if match.depthwise is not None:
            predicates.append((match.depthwise, self._is_depthwise))
        if match.position is not None:
            members = {"first": self._first, "last": self._last, "tail": self._tail}[match.position]
            predicates.append((True, lambda e: e in members))
        if match.before_output is not None:
            predicates.append((match.before_output, self._is_before_output))
        if match.gate is not None:
            predicates.append((match.gate, self._gates))
        if match.shared is not None:
            predicates.append((match.shared, self._shares_weight))
        for kinds, forward in ((match.feeds, True), (match.follows, False)):
            if kinds is not None:
                neighbours = self._neighbours(_check_kinds(kinds, origin), forward)
                predicates.append((True, lambda e, near=neighbours: e in near))  # type: ignore[misc]
        return predicates

    def _is_depthwise(self, expr: Expr) -> bool | None:
        call = self.calls[expr]
        if call.kind not in ("conv2d", "conv_transpose2d") or call.weight is None:
            return None
        return call.attrs["groups"] > 1 and int(call.weight.shape[2]) == 1

    # -- positions ----------------------------------------------------------------------------------

    @cached_property
    def _first(self) -> set[Expr]:
        after = _reachable(self.exprs, self._computes, lambda e: [n.expr for n in e.inputs])
        return {e for e in self.ops if self._computes(e) and e not in after}

    @cached_property
    def _last(self) -> set[Expr]:
        before = _reachable(reversed(self.exprs), self._computes, self._readers)
        return {e for e in self.ops if self._computes(e) and e not in before}

    @cached_property
    def _tail(self) -> set[Expr]:
        return tail(self.exprs, self.calls)

    def _computes(self, expr: Expr) -> bool:
        return computes(expr, self.calls)

    @staticmethod
    def _readers(expr: Expr) -> list[Expr]:
        return [u for n in expr.outputs for u in n.users]

    def _is_before_output(self, expr: Expr) -> bool:
        """Returns whether only moves, norms and activations stand between the op and a graph output."""
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

    def _neighbours(self, kinds: frozenset[str], forward: bool) -> set[Expr]:
        """Finds the exprs before (``forward``) or after an op of ``kinds``, skipping transparent ops."""
        neighbours: set[Expr] = set()
        for expr in reversed(self.exprs) if forward else self.exprs:
            adjacent = self._readers(expr) if forward else [n.expr for n in expr.inputs]
            for other in adjacent:
                call = self.calls.get(other)
                if call is None:
                    continue
                if call.kind in kinds or (other in neighbours and self._is_transparent(call)):
                    neighbours.add(expr)
        return neighbours

    @cached_property
    def _static(self) -> set[Node]:
        return static_nodes(self.traced)

    def _is_transparent(self, call: OpCall) -> bool:
        """Returns whether ``call`` moves values, or changes each of them only by parameters and numbers."""
        if call.role in _TRANSPARENT_ROLES:
            return True
        computed = [n for n in call.inputs if n not in self._static]
        return call.kind in _SCALING_KINDS and len(computed) == 1

    def _gates(self, expr: Expr) -> bool:
        """Returns whether the result, moved or not, has one value a channel and multiplies a feature map."""
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

    def _shares_weight(self, expr: Expr) -> bool | None:
        call = self.calls[expr]
        if call.weight is None:
            return None
        readers = [u for u in users(call.weight) if u in self.calls]
        return len(readers) > 1

    def _between(self, start: str, end: str, origin: str) -> set[Expr]:
        """Finds the exprs on a path from node ``start`` to node ``end``, both ends included."""
        ends = {end: [e for e, names in self._names.items() if end in names] for end in (start, end)}
        for name, named in ends.items():
            if not named:
                raise ConfigError(
                    f"{origin}: subgraph names the node {name!r}, which this graph does not have."
                )
        after_start = _closure(ends[start], self._readers)
        before_end = _closure(ends[end], lambda e: [n.expr for n in e.inputs])
        return after_start & before_end


def tail(order: Sequence[Expr], calls: dict[Expr, OpCall]) -> set[Expr]:
    """Finds the ops after the last computing ones: no computing op depends on their values.

    The mean of a distribution (see `computes`) is one of them, whoever wrote it. Boxes that choose where
    another op reads (``roi_align``) do not count as values. An activation or a norm that can be fused into
    the op before it belongs to that op.

    Args:
        order: the exprs of a flat graph.
        calls: expr -> the `OpCall` that it is read as.
    """
    feeding: set[Node] = set()  # the nodes whose values some computing op depends on
    members: set[Expr] = set()
    for expr in reversed(order):
        call = calls.get(expr)
        feeds = any(n in feeding for n in expr.outputs)
        if feeds or computes(expr, calls):
            read = expr.inputs if call is None else (*call.inputs, *filter(None, (call.weight, call.bias)))
            feeding.update(read)
        elif call is not None:
            members.add(expr)
    for expr in order:
        call = calls.get(expr)
        fusable = call is not None and call.role in (Role.ACTIVATION, Role.NORM)
        if fusable and expr in members and expr.inputs[-1].expr not in members:
            members.remove(expr)
    return members


def computes(expr: Expr, calls: dict[Expr, OpCall]) -> bool:
    """Returns whether an op is a layer or a product of activations.

    The mean of a distribution is none, though some write it as a layer: a convolution, linear layer or
    product with fixed numbers of one result, after a softmax. Detectors decode their boxes by it (Li et al.
    2020, "Generalized Focal Loss", equation 5).
    """
    call = calls.get(expr)
    if call is None or call.role is not Role.COMPUTE:
        return False
    fixed = call.weight if call.weight is not None else call.inputs[-1]
    single = fixed.shape is not None and fixed.shape[0 if call.weight is not None else -1] == 1
    vector = call.weight is None and fixed.shape is not None and len(fixed.shape) == 1
    if not (single or vector) or not isinstance(fixed.expr, (GetAttr, Constant)):
        return True
    source = calls.get(call.inputs[0].expr)
    while source is not None and source.role is Role.CARRY:
        source = calls.get(source.inputs[0].expr)
    return source is None or source.kind != "softmax"


def _closure(starts: Iterable[Expr], neighbours: Callable[[Expr], Iterable[Expr]]) -> set[Expr]:
    """Finds the exprs that ``starts`` reach through ``neighbours``, including ``starts``."""
    reached: set[Expr] = set()
    stack = list(starts)
    while stack:
        expr = stack.pop()
        if expr not in reached:
            reached.add(expr)
            stack.extend(neighbours(expr))
    return reached


def _reachable(
    order: Iterable[Expr], is_source: Callable[[Expr], bool], neighbours: Callable[[Expr], Iterable[Expr]]
) -> set[Expr]:
    """Finds the exprs that reach a source through ``neighbours``, in one walk along ``order``."""
    reached: set[Expr] = set()
    for expr in order:
        if any(e in reached or is_source(e) for e in neighbours(expr)):
            reached.add(expr)
    return reached


def _is_gate(gate: Node, other: Node) -> bool:
    """Returns whether ``gate`` has one value a channel and ``other`` is a feature map."""
    if gate.shape is None or other.shape is None or len(gate.shape) != 4 or len(other.shape) != 4:
        return False
    return tuple(gate.shape[2:]) == (1, 1) and tuple(other.shape[2:]) != (1, 1)


def _check_kinds(kinds: Sequence[str], origin: str) -> frozenset[str]:
    """Returns ``kinds`` as a set; raises a `ConfigError` for a kind that does not exist."""
    unknown = [k for k in kinds if k not in ops.kinds()]
    if unknown:
        raise ConfigError(f"{origin}: unknown op {unknown[0]!r}; known: {', '.join(ops.kinds())}.")
    return frozenset(kinds)


def _any_matches(patterns: Sequence[str], names: Iterable[str]) -> bool:
    """Returns whether one of ``names`` is one of ``patterns``, or matches it."""
    return any(name == p or fnmatch.fnmatchcase(name, p) for name in names for p in patterns)


def _expr_names(traced: TracedModule) -> dict[Expr, list[str]]:
    """Returns expr -> its names: of its module, its nodes, and of these in the file that was imported.

    Args:
        traced: a flat graph.
    """
    origin, interface = read_origin(traced), read_interface(traced)
    results = {} if origin is None else origin.results
    names: dict[Expr, list[str]] = {}
    for expr in (*(n.expr for n in traced.graph.inputs), *exprs(traced)):
        of_file = (results[n.name] for n in expr.outputs if n.name in results)
        own = [module_path(expr), *(n.name for n in expr.outputs)]
        own += (name for result in of_file for name in result.names)
        names[expr] = [name for name in own if name]
    if interface is not None:
        ends = zip(interface.inputs, traced.graph.inputs[1:], strict=True)
        for tensor, node in (*ends, *zip(interface.outputs, traced.graph.outputs, strict=True)):
            names[node.expr].append(tensor.name)
    return names


def find_region(traced: TracedModule, region: Region, place: Callable[..., str]) -> set[Expr]:
    """Finds the exprs of a region: those on a path from its inputs to its outputs, both ends included.

    Args:
        traced: a flat, expanded graph.
        region: name patterns of the inputs and outputs of the region.
        place: `QConfig.place`: gives the source of the region or of one of its ends, for messages.

    Raises:
        ConfigError: for a pattern that no node and no module has, or a region without an op.
    """
    order = exprs(traced)
    members = set(order)
    if region.outputs is not None:
        ends = _find_named(traced, region.outputs, _subject(place, "outputs"))
        members &= _closure(ends, lambda e: [n.expr for n in e.inputs])
    if region.inputs is not None:
        starts = _find_named(traced, region.inputs, _subject(place, "inputs"))
        members &= _closure(starts, lambda e: [u for n in e.outputs for u in n.users])
    if not any(e in members for e in order):
        raise ConfigError(f"{place('region')}: no op lies between the inputs and the outputs of the region.")
    return members


def _subject(place: Callable[..., str], end: str) -> str:
    """Returns the subject of a message about an end of the region: an argument, or a key with its file."""
    source = place(f"region.{end}", "region")
    return source if source == f"argument {end}" else f"{source}: region.{end}"


def _find_named(traced: TracedModule, patterns: Sequence[str], origin: str) -> list[Expr]:
    """Finds the exprs whose node or module a pattern matches, in the order of ``patterns``."""
    names: dict[str, list[Expr]] = {}
    for expr, own in _expr_names(traced).items():
        parts = module_path(expr).split(".")
        for name in (*own, *(".".join(parts[:end]) for end in range(1, len(parts)))):
            names.setdefault(name, []).append(expr)
    named: list[Expr] = []
    for pattern in patterns:
        matched = [name for name in names if _any_matches([pattern], [name])]
        if not matched:
            nearest = difflib.get_close_matches(pattern, names, n=5, cutoff=0.0)
            raise ConfigError(
                f"{origin} names {pattern!r}, which is no node or module here; the nearest names are "
                f"{', '.join(nearest)}."
            )
        named += [e for name in matched for e in names[name]]
    return named
