"""Sites: places fake quants for activations, carries integers through moves, and ties sites."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from qtrace.graph.types import Constant, Expr, GetAttr, Node, TensorNode
from qtrace.graph.walk import module_path
from qtrace.ops import Role
from qtrace.preparation.annotation import DynamicInput, Plan, Site, free_name
from qtrace.preparation.passes._chains import Chain, Chains, find_summands, output_choice, output_plan
from qtrace.preparation.passes._requests import Requests
from qtrace.preparation.passes._view import View, distinct

__all__ = ["Placement", "place_dynamic", "place_sites", "tie_sites"]


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
        kept, merged = root(first), root(second)
        if kept and merged and kept != merged and placement.plan(kept) == placement.plan(merged):
            parents[merged] = kept
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
