"""Chains, the parameters that their readers request, and the sites that `annotate` places for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from qtrace.graph.types import Constant, Expr, GetAttr, Node, TensorNode
from qtrace.graph.walk import is_float_tensor, module_path, owner
from qtrace.ops import OpCall, Role
from qtrace.preparation.annotation import DynamicInput, Plan, Site, free_name
from qtrace.preparation.passes._choices import Choice
from qtrace.preparation.passes._view import View, distinct

# Chains: the ops that a backend computes as one kernel, such as conv, norm and relu.


@dataclass(frozen=True)
class Chain:
    """Ops that the backend computes in one kernel.

    Attributes:
        exprs: the ops in execution order; each after the first one is fused into the kernel of the first.
        norm: the BatchNorm of the chain that stays in the graph and is folded whenever it does not train.
    """

    exprs: tuple[Expr, ...]
    norm: Expr | None = None

    @property
    def head(self) -> Expr:
        """The first op: its inputs are the inputs of the kernel."""
        return self.exprs[0]

    @property
    def tail(self) -> Expr:
        """The last op: its result is the result of the kernel."""
        return self.exprs[-1]

    @property
    def output(self) -> TensorNode:
        """The result of the kernel."""
        return self.tail.outputs[0]


Chains: TypeAlias = Mapping[Expr, Chain]


def find_weights(view: View, chains: Chains) -> dict[TensorNode, list[Expr]]:
    """Returns the weights that are rounded -> the layers that round them."""
    layers: dict[TensorNode, list[Expr]] = {}
    for expr in view.order:
        weight = view.calls[expr].weight if expr in view.calls else None
        rounds = expr in chains and chains[expr].head is expr
        if weight is not None and is_float_tensor(weight) and (rounds or view.method(expr)):
            layers.setdefault(weight, []).append(expr)
    return layers


def reads_rounded(view: View, weights: Mapping[TensorNode, list[Expr]], expr: Expr) -> bool:
    """Returns whether ``expr`` reads rounded weights as their layers do, so that each is stored once.

    An op on integers rounds what it reads by itself, and so does a layer that reads the moved weight.
    """
    return not view.on_integers(expr) and weights.keys().isdisjoint(expr.outputs)


def find_chains(view: View) -> dict[Expr, Chain]:
    """Finds the ops that the backend computes in one kernel.

    Returns:
        expr -> its chain, for every op that computes on integers; heads in execution order.
    """
    chains: dict[Expr, Chain] = {}
    for expr in view.order:
        if expr not in chains and view.on_integers(expr):
            chain = _grow(view, expr)
            chains.update(dict.fromkeys(chain.exprs, chain))
    return chains


def _grow(view: View, head: Expr) -> Chain:
    """Builds the chain of ``head`` with the norm and the activation that its kernel computes."""
    call, members, norm = view.calls[head], [head], None
    follower = view.only_user(head)
    if follower is not None and _folds(view, call, view.calls[follower]):
        norm = follower
        members.append(norm)
        follower = view.only_user(norm)
    fused = view.backend.fused.get(call.kind, frozenset())
    if follower is not None and view.calls[follower].kind in fused:
        members.append(follower)
    return Chain(tuple(members), norm)


def _folds(view: View, layer: OpCall, norm: OpCall) -> bool:
    """Returns whether ``norm`` can stay and be folded into ``layer`` whenever it does not train."""
    if norm.role is not Role.NORM or layer.weight is None or owner(norm.expr) is None:
        return False
    plan, axes = view.weight_plan(layer)
    unshared = len(layer.weight.users) == 1 and isinstance(layer.weight.expr, GetAttr)
    return unshared and bool(axes) and plan.scheme.symmetric and plan.scheme.signed


@dataclass(frozen=True)
class Summand:
    """What a sum adds before it is rounded, in the kernel of the layer that gives it.

    Attributes:
        read: the input of the sum.
        result: the result of the layer: the same, or the value from which identities lead to it.
    """

    read: TensorNode
    result: TensorNode


def find_summands(view: View, chains: Chains) -> dict[Expr, Summand]:
    """Finds the results that a sum adds before they are rounded, in the kernel of the layer before it.

    Of two such layers, the kernel of the one that the sum names first has the sum.

    Returns:
        sum -> what it reads unrounded.
    """
    summands: dict[Expr, Summand] = {}
    if not view.backend.added_unrounded:
        return summands
    by_output = {chain.output: chain for chain in chains.values()}
    for expr, chain in chains.items():
        call = view.calls[expr]
        if chain.head is not expr or call.kind != "add" or len(set(call.inputs)) != 2:
            continue
        for node in call.inputs:
            result = _behind_identities(view, node)
            source = by_output.get(result)
            if source is not None and _is_added_unrounded(view, source, call):
                summands[expr] = Summand(node, result)
                break
    return summands


def _behind_identities(view: View, node: TensorNode) -> TensorNode:
    """Returns the node that reaches ``node`` through nothing but identities that nothing else reads."""
    call = view.calls.get(node.expr)
    while call is not None and call.kind == "identity" and len(node.users) == 1 and node not in view.outputs:
        node = call.inputs[0]
        call = view.calls.get(node.expr)
    return node


def _is_added_unrounded(view: View, chain: Chain, total: OpCall) -> bool:
    """Returns whether ``total``, of two inputs of one shape, may add the result of ``chain`` unrounded."""
    node = chain.output
    alone = len(node.users) == 1 and node not in view.outputs
    same = len({tuple(n.shape or ()) for n in total.inputs}) == 1
    able = view.calls[chain.head].kind in view.backend.added_unrounded
    return alone and same and able and output_choice(view, chain).output is None


def output_choice(view: View, chain: Chain) -> Choice:
    """Returns the config's choice for the result of ``chain``: by its last rule for the head or the tail."""
    first, last = view.choices[chain.head], view.choices[chain.tail]
    choice = last if last.rank > first.rank else first
    mixed = view.mixed
    stays_float = chain.output in mixed.results or chain.output in mixed.selecting.results
    if stays_float and choice.output is None:
        return replace(choice, quantize_output=False)
    return choice


def output_plan(view: View, chain: Chain) -> tuple[Plan, bool]:
    """Returns the plan of the result of ``chain``, and whether the config fixes its scheme.

    Consumers that want another scheme than a fixed one round again.
    """
    choice = output_choice(view, chain)
    scheme = choice.output or choice.activation.scheme
    return choice.activation.plan(scheme), choice.output is not None


# Requests: the parameters that the readers of a tensor ask for, seen through ops that only move values.


class Request(NamedTuple):
    """The parameters that an expr asks for at its inputs.

    Attributes:
        reader: the expr.
        plan: the plan that the expr asks for.
        partial: whether the expr moves values and some reader of the moved value wants it in float.
    """

    reader: Expr
    plan: Plan
    partial: bool


Requests: TypeAlias = Mapping[Node, Sequence[Request]]


def propagate_requests(view: View, chains: Chains) -> dict[Node, list[Request]]:
    """Collects the requests of all exprs, backwards from the ops that compute on integers.

    Returns:
        node -> the requests of the exprs that read it, in execution order.
    """
    requests: dict[Node, list[Request]] = {}
    summands, weights = find_summands(view, chains), find_weights(view, chains)
    for expr in reversed(view.order):
        request = _request(view, chains, requests, expr)
        if request is not None:
            for node in dict.fromkeys(view.calls[expr].inputs):
                if expr in summands and summands[expr].read is node:
                    continue
                if node in weights and reads_rounded(view, weights, expr):
                    continue
                requests.setdefault(node, []).insert(0, request)
    return requests


def _request(view: View, chains: Chains, requests: Requests, expr: Expr) -> Request | None:
    """Returns what ``expr`` requests: its own choice if it computes, its readers' request if it moves."""
    if expr in chains and chains[expr].head is not expr:
        return None
    if view.on_integers(expr):
        choice = view.choices[expr]
        return Request(expr, choice.activation.plan(choice.activation.scheme), False)
    if not view.carries(expr):
        return None
    plans = distinct(request.plan for node in expr.outputs for request in requests.get(node, ()))
    if len(plans) != 1:
        return None
    partial = not all(_all_request(view, node, requests.get(node, ())) for node in expr.outputs)
    return Request(expr, plans[0], partial)


def _all_request(view: View, node: TensorNode, requests: Sequence[Request]) -> bool:
    """Returns whether every reader of the value of ``node``, moved or not, asks for integers."""
    readers = [request.reader for request in requests if not request.partial]
    calls = ((user, view.calls.get(user)) for user in node.users)
    shape_readers = [user for user, call in calls if call is not None and call.role is Role.SHAPE]
    return view.all_values_read_by(node, [*readers, *shape_readers])


# Sites: places fake quants for activations, carries integers through moves, and ties sites.


@dataclass(frozen=True)
class Placement:
    """The activation sites of a graph, and the nodes that hold integers.

    Attributes:
        sites: name -> activation site, in execution order.
        groups: node -> the group of its value, for nodes that hold integers.
        reads: (expr, node) -> the group that the expr reads, where it differs from the node's.
        factors: node -> factor of its group's scale, for nodes with another scale.
    """

    sites: dict[str, Site] = field(default_factory=dict)
    groups: dict[Node, str] = field(default_factory=dict)
    reads: dict[tuple[Expr, Node], str] = field(default_factory=dict)
    factors: dict[Node, float] = field(default_factory=dict)

    def group_read(self, expr: Expr, node: Node) -> str:
        """Returns the group that ``expr`` reads from ``node``; "" for floats."""
        return self.reads.get((expr, node)) or self.groups.get(node, "")

    def factor_read(self, expr: Expr, node: Node) -> float:
        """Returns the factor of the scale of the group that ``expr`` reads from ``node``."""
        return 1.0 if (expr, node) in self.reads else self.factors.get(node, 1.0)

    def plan(self, group: str) -> Plan:
        """Returns the plan of the sites of ``group``."""
        plan = self.sites[group].plan
        assert plan is not None  # only a bias has none
        return plan

    def carried(self) -> dict[str, str]:
        """Maps the names of the nodes that hold integers without being rounded to their groups."""
        rounded = {site.node for site in self.sites.values() if site.consumers is None}
        return {node.name: group for node, group in self.groups.items() if node.name not in rounded}


def place_sites(view: View, chains: Chains, requests: Requests) -> Placement:
    """Walks the graph forwards and places a site wherever readers want parameters that the value lacks.

    Returns:
        The placement with a group of its own for each site.
    """
    placer = _Placer(view, requests, {summand.result for summand in find_summands(view, chains).values()})
    for node in view.traced.graph.inputs:
        placer.place_before_readers(node, None)
    for expr in view.order:
        chain = chains.get(expr)
        if view.carries(expr):
            placer.place_move(expr)
        elif chain is None:
            for node in expr.outputs:
                placer.place_before_readers(node, None)
        elif chain.tail is expr:
            placer.place_output(chain)
    return placer.placement


class _Placer:
    """Adds the sites of one op at a time to ``placement``."""

    def __init__(self, view: View, requests: Requests, summands: set[TensorNode]) -> None:
        self.view, self.requests, self.summands = view, requests, summands
        self.placement = Placement()

    def place_move(self, expr: Expr) -> None:
        """Gives the outputs of the move ``expr`` the group of its input, if that holds integers."""
        placement, source = self.placement, self.view.calls[expr].inputs[0]
        group = placement.group_read(expr, source)
        factor = placement.factor_read(expr, source) * self.view.scaling.get(expr, 1.0)
        for node in expr.outputs:
            if group:
                placement.groups[node] = group
                if factor != 1.0:
                    placement.factors[node] = factor
            self.place_before_readers(node, placement.plan(group) if group else None)

    def place_output(self, chain: Chain) -> None:
        """Rounds the result of ``chain`` if its readers want integers that it does not hold yet."""
        view, node, call = self.view, chain.output, self.view.calls[chain.head]
        own, fixed = output_plan(view, chain)
        if call.role is Role.CONCAT and view.backend.ties_concat:
            self.placement.groups[node] = self.placement.group_read(chain.head, call.inputs[0])
            self.place_before_readers(node, own)
            return
        if _keeps_grid(view, chain):
            own = self.placement.plan(self.placement.group_read(chain.head, call.inputs[0]))
            self.placement.groups[node] = self._add(node, node.name, None, own)
            self.place_before_readers(node, own)
            return
        plans = distinct(request.plan for request in self.requests.get(node, ()))
        one_width = call.kind in view.backend.one_width
        unrounded = not output_choice(view, chain).quantize_output
        unrounded |= view.must_not_vanish(node) or node in self.summands
        unrounded |= len(plans) > 1 and not one_width
        unrounded |= view.backend.rounds_for_readers and not plans
        if unrounded and not fixed:
            self.place_before_readers(node, None)
            return
        # A result with a scheme of its own is rounded once where readers want that scheme: by their observer.
        fitting = [p for p in plans if not fixed or p.scheme == own.scheme]
        fitting = [p for p in fitting if not one_width or fixed or p.scheme.bits == own.scheme.bits]
        plan = fitting[0] if fitting else own
        self.placement.groups[node] = self._add(node, node.name, None, plan)
        self.place_before_readers(node, plan)

    def place_before_readers(self, node: Node, present: Plan | None) -> None:
        """Places sites between ``node`` and the readers that want another plan than the ``present`` one.

        A move wants what its readers want. If one of them wants the float value, there is no site before the
        move, and the other readers round the moved value.
        """
        requests = [request for request in self.requests.get(node, ()) if not request.partial]
        for plan in distinct(request.plan for request in requests if request.plan != present):
            readers = [request.reader for request in requests if request.plan == plan]
            names = tuple(reader.outputs[0].name for reader in readers)
            whole = node.name not in self.placement.sites and self.view.all_values_read_by(node, readers)
            preferred = node.name if whole else f"{node.name}__{names[0]}"
            name = self._add(node, preferred, names, plan)
            self.placement.reads.update(((reader, node), name) for reader in readers)

    def _add(self, node: Node, preferred: str, consumers: tuple[str, ...] | None, plan: Plan) -> str:
        """Adds a site with a group of its own; returns its name, ``preferred`` if that is free."""
        name = free_name(preferred, self.placement.sites, self.view.node_names)
        static = consumers is not None and isinstance(node.expr, (GetAttr, Constant))
        axes = () if plan.scheme.axis is None else (plan.scheme.axis,)
        self.placement.sites[name] = Site(name, "activation", node.name, consumers, name, plan, axes, static)
        return name


def _keeps_grid(view: View, chain: Chain) -> bool:
    """Returns whether the kernel of ``chain`` gives integers of its input's scale, and they are wanted."""
    keeps_grid, choice = view.backend.keeps_grid, output_choice(view, chain)
    if keeps_grid is None or not keeps_grid(view.calls[chain.head]):
        return False
    return choice.output is None and choice.quantize_output and not view.must_not_vanish(chain.output)


def tie_sites(view: View, chains: Chains, placement: Placement) -> Placement:
    """Merges the groups of ``placement`` that share parameters; each keeps the name of one of its sites."""
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        while name in parents:
            name = parents[name]
        return name

    ties = (rule(view, chains, placement) for rule in (_concatenated, _same_grids, _shared))
    for first, second in itertools.chain.from_iterable(ties):
        tied, merged = root(first), root(second)
        if tied and merged and tied != merged and placement.plan(tied) == placement.plan(merged):
            parents[merged] = tied
    sites = {name: replace(s, group=root(name)) for name, s in placement.sites.items()}
    groups = {node: root(name) for node, name in placement.groups.items()}
    reads = {key: root(name) for key, name in placement.reads.items()}
    return Placement(sites, groups, reads, placement.factors)


def _concatenated(view: View, chains: Chains, placement: Placement) -> Iterator[tuple[str, str]]:
    """Yields pairs of the groups that a concat reads, if its kernel only moves integers."""
    for expr in view.order if view.backend.ties_concat else ():
        chain = chains.get(expr)
        if chain is not None and chain.tail is expr and view.calls[chain.head].role is Role.CONCAT:
            inputs = view.calls[chain.head].inputs
            first, *others = (placement.group_read(chain.head, node) for node in inputs)
            yield from ((first, other) for other in others)


def _same_grids(view: View, chains: Chains, placement: Placement) -> Iterator[tuple[str, str]]:
    """Yields pairs of the groups that a kernel reads and gives, if it keeps the scale of its input."""
    for expr, chain in chains.items():
        if chain.head is expr and _keeps_grid(view, chain):
            source = placement.group_read(expr, view.calls[expr].inputs[0])
            yield source, placement.groups.get(chain.output, "")


def _shared(view: View, chains: Chains, placement: Placement) -> Iterator[tuple[str, str]]:
    """Yields pairs of the groups that the calls of one module read or give, if the config ties them."""
    first_chains: dict[object, Chain] = {}  # the weight, or the kind and the module's path -> its first call
    for expr, chain in chains.items():
        if chain.head is not expr or not view.choices[expr].share:
            continue
        call = view.calls[expr]
        key = call.weight if call.weight is not None else (call.kind, module_path(expr))
        first = first_chains.setdefault(key, chain)
        for first_input, node in zip(view.calls[first.head].inputs, call.inputs, strict=False):
            yield placement.group_read(first.head, first_input), placement.group_read(expr, node)
        yield placement.groups.get(first.output, ""), placement.groups.get(chain.output, "")


def place_dynamic(view: View, placement: Placement, weights: Mapping[Expr, Site]) -> tuple[DynamicInput, ...]:
    """Places one rounding before all layers with method ``dynamic`` that read the same value.

    Args:
        view: the graph under its config.
        placement: the activation sites.
        weights: layer -> the site of its weight.
    """
    readers: dict[TensorNode, list[str]] = {}
    for expr in weights:
        if view.method(expr) == "dynamic":
            readers.setdefault(view.calls[expr].inputs[0], []).append(expr.outputs[0].name)
    used_names = {*placement.sites, *(site.name for site in weights.values())}
    dynamic = []
    for node, names in readers.items():
        name = free_name(f"{node.name}_dynamic", used_names, view.node_names)
        used_names.add(name)
        dynamic.append(DynamicInput(name, node.name, tuple(names)))
    return tuple(dynamic)
