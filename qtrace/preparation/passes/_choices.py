"""Chooses how each op is quantized: the rules and the region of a config, matched with the ops of a graph."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from qtrace import ops
from qtrace.config import Match, QConfig, Region, Rule, Spec
from qtrace.config.backends import Backend
from qtrace.config.checking import check_method, check_plugin, check_scheme, prefix_errors
from qtrace.config.rule import Method, Placement
from qtrace.errors import ConfigError
from qtrace.graph.interface import read_interface
from qtrace.graph.interpreter import static_nodes
from qtrace.graph.origin import read_origin
from qtrace.graph.types import Constant, Expr, GetAttr, Node, TracedModule
from qtrace.graph.walk import exprs, module_path, users
from qtrace.ops import OpCall, Role
from qtrace.preparation.annotation import Plan
from qtrace.scheme import QScheme

# Matches the rules and the region of a config with the ops of a graph: by kind, name and structure.

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


# Chooses how each op is quantized, by the rules of a config in order.

GIVEN = "the file"
"""The origin of the choices that a quantized ONNX file brings."""


@dataclass(frozen=True)
class RoundingChoice:
    """How the tensors of one sort are rounded.

    Attributes:
        scheme: the scheme that the config asks for.
        observer: the observer of the sites.
        fakequant: the fake quant of the sites.
    """

    scheme: QScheme
    observer: Spec
    fakequant: Spec

    def plan(self, scheme: QScheme) -> Plan:
        """Returns the plan of a site with ``scheme``, which may differ from the scheme of the config."""
        observer, fakequant = (
            (spec.name, tuple(sorted(spec.options.items()))) for spec in (self.observer, self.fakequant)
        )
        return Plan(scheme, *observer, *fakequant)


@dataclass(frozen=True)
class Choice:
    """The choice of a config for one op.

    Attributes:
        quantize: False keeps the op in float; None leaves it to the backend.
        decided: origin of the rule that set ``quantize``.
        activation: how the op's inputs are rounded, and its output if no consumer wants another scheme.
        weight: how the op's weight is rounded.
        output: scheme of the op's result; None if the config gives none.
        quantize_output: False leaves the op's result in float.
        share: whether the calls of one module share their sites.
        placement: which ops run on integers: "everything", "balanced" or "fastest".
        method: how a layer is quantized: "static", "dynamic" or "weight_only".
        method_origin: the rule that set ``method``, or the place in the config.
        rules: origins of the rules that matched, in order.
        ranks: positions of these rules in the config.
    """

    quantize: bool | None
    activation: RoundingChoice
    weight: RoundingChoice
    output: QScheme | None = None
    quantize_output: bool = True
    share: bool = False
    placement: Placement = "everything"
    method: Method = "static"
    method_origin: str = ""
    rules: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    decided: str = ""

    @property
    def rank(self) -> int:
        """The position of the last rule that matched; -1 without one."""
        return self.ranks[-1] if self.ranks else -1


def choose(
    traced: TracedModule,
    calls: dict[Expr, OpCall],
    qconfig: QConfig,
    backend: Backend,
    ranks: Mapping[str, Sequence[int]] | None = None,
) -> dict[Expr, Choice]:
    """Chooses for each op by the rules of ``qconfig`` in order; a later rule wins over an earlier one.

    Args:
        traced: a flat, expanded graph.
        calls: expr -> the `OpCall` that it is read as.
        qconfig: the config.
        backend: the target, whose schemes the rules change.
        ranks: name of an expr's first output -> the positions of the rules that have matched it; None to
            match them.

    Returns:
        expr -> choice, for every expr in ``calls``.

    Raises:
        ConfigError: for a rule that matches nothing or names an unknown op, or a scheme that the backend
            cannot run, with the rule's file and line.
    """
    selector = Selector(traced, calls)
    choices = dict.fromkeys(calls, _default_choice(qconfig, backend))
    for rank, rule in enumerate(qconfig.rules):
        if rule.backends is not None and backend.name not in rule.backends:
            continue
        if ranks is None:
            matched = selector.select(rule)
        else:
            matched = [expr for expr in calls if rank in ranks.get(expr.outputs[0].name, ())]
        if ranks is None and not matched and not rule.optional:
            raise ConfigError(
                f"{rule.origin}: the rule {rule.match.to_dict()} matches no op of this graph: fix it, drop "
                "it, or say optional: true."
            )
        if ranks is None:
            _check_effect(rule, [calls[expr] for expr in matched])
        changed: dict[int, Choice] = {}  # by id, as options need not be hashable; most ops share a choice
        for expr in matched:
            old = choices[expr]
            if id(old) not in changed:
                changed[id(old)] = replace(_apply(old, rule, backend), ranks=(*old.ranks, rank))
            choices[expr] = changed[id(old)]
    return choices


def _check_effect(rule: Rule, matched: list[OpCall]) -> None:
    """Refuses a rule about weights only if nothing that it matches has one."""
    content = (
        rule.quantize,
        rule.quantize_output,
        rule.activation,
        rule.output,
        rule.fakequant,
        rule.share,
        rule.placement,
        rule.method,
    )
    if rule.observers is not None and rule.observers.activation is not None:
        return
    about_weights = all(value is None for value in content)
    if about_weights and matched and all(call.weight is None for call in matched):
        kinds = ", ".join(sorted({call.kind for call in matched}))
        raise ConfigError(
            f"{rule.origin}: the rule changes weights only, which matched ops ({kinds}) lack: drop it."
        )


def _default_choice(qconfig: QConfig, backend: Backend) -> Choice:
    """Builds the choice for an op that no rule matches."""
    activation, weight = backend.activation, backend.weight
    if qconfig.activation is not None:
        activation = qconfig.activation.apply(activation)
    if qconfig.weight is not None:
        weight = qconfig.weight.apply(weight)
    fakequant = qconfig.effective_fakequant
    return Choice(
        None,
        RoundingChoice(activation, qconfig.activation_observer, fakequant),
        RoundingChoice(weight, qconfig.weight_observer, fakequant),
        placement=qconfig.effective_placement,
        method=qconfig.effective_method,
        method_origin=qconfig.place("method"),
    )


def _apply(old: Choice, rule: Rule, backend: Backend) -> Choice:
    """Returns the choice ``old`` with the changes of ``rule``."""
    with prefix_errors(rule.origin):
        activation, weight = (
            changes.apply(rounding.scheme) if changes else rounding.scheme
            for changes, rounding in ((rule.activation, old.activation), (rule.weight, old.weight))
        )
        output = rule.output.apply(old.output or activation) if rule.output else old.output
    if rule.method is not None:
        check_method(backend, rule.method, rule.origin)
    for sort, changes, scheme in (
        ("activation", rule.activation, activation),
        ("activation", rule.output, output),
        ("weight", rule.weight, weight),
    ):
        if changes and scheme is not None:
            check_scheme(backend, sort, scheme, rule.origin)
    observers = rule.observers
    choice = replace(
        old,
        quantize=old.quantize if rule.quantize is None else rule.quantize,
        activation=RoundingChoice(
            activation,
            (observers.activation if observers else None) or old.activation.observer,
            rule.fakequant or old.activation.fakequant,
        ),
        weight=RoundingChoice(
            weight,
            (observers.weight if observers else None) or old.weight.observer,
            rule.fakequant or old.weight.fakequant,
        ),
        output=output,
        quantize_output=old.quantize_output if rule.quantize_output is None else rule.quantize_output,
        share=old.share if rule.share is None else rule.share,
        placement=rule.placement or old.placement,
        method=rule.method or old.method,
        method_origin=rule.origin if rule.method else old.method_origin,
        rules=(*old.rules, rule.origin),
        decided=old.decided if rule.quantize is None else rule.origin,
    )
    for sort, rounding in (("activation", choice.activation), ("weight", choice.weight)):
        check_plugin("qtrace.observers", rounding.observer, sort, rounding.scheme, lambda _: rule.origin)
        if sort == "weight" or choice.method == "static":
            check_plugin("qtrace.fakequant", rounding.fakequant, sort, rounding.scheme, lambda _: rule.origin)
    return choice
