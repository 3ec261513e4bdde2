"""Annotate: decides for every expr and tensor what is quantized, how, and why. It changes nothing.

Three sweeps over the flat graph. *Chains*: which ops the backend computes as one (conv + relu).
*Wants*, backwards: which parameters the readers of a tensor ask for, seen through ops that only move
values. *Sites*, forwards: where a fake quant goes; values stay integers through moves.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from qtrace import ops
from qtrace.config import QConfig, backends
from qtrace.errors import ConfigError
from qtrace.graph.dataflow import fixed_nodes, static_nodes
from qtrace.graph.types import Constant, Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, module_path
from qtrace.ops import Role
from qtrace.preparation.annotation import Annotation, Fold, Plan, Site
from qtrace.preparation.passes._chains import Chains
from qtrace.preparation.passes._notes import Notes
from qtrace.preparation.passes._region import inside
from qtrace.preparation.passes._view import View
from qtrace.preparation.passes.select import choose

__all__ = ["annotate"]

_T = TypeVar("_T")


def annotate(traced: TracedModule, qconfig: QConfig) -> Annotation:
    """Decides what ``prepare`` will insert into ``traced``.

    Args:
        traced: a flat, expanded graph; it is only read.
        qconfig: the config; its backend says which ops run on integers.

    Returns:
        A note for every op and the list of sites, the same for the same graph and config.

    Raises:
        ConfigError: for rules that match nothing or ask for what the backend cannot run.
    """
    backend = backends.get(qconfig.backend)
    calls = {e: c for e in exprs(traced) if (c := ops.read(e)) is not None}
    choices = choose(traced, calls, qconfig, backend)
    region = None if qconfig.region is None else inside(traced, qconfig.region, qconfig.place)
    view = View(traced, calls, choices, backend, region, static_nodes(traced))
    origins = tuple(rule.origin for rule in qconfig.rules)
    return dataclasses.replace(_Annotator(view).run(), origins=origins)


class _Annotator:
    def __init__(self, view: View) -> None:
        self.view, self.calls = view, view.calls
        self.chains = Chains(view)
        self.wants: dict[Node, list[tuple[Plan, Expr]]] = {}
        self.asks: dict[Expr, str] = {}
        self.mixed: set[Expr] = set()  # moves of which some reader wants the float value
        self.sites: list[Site] = []
        self.state: dict[Expr, str] = {}
        self.reads: dict[tuple[Expr, Expr], str] = {}
        self.weight_site: dict[Expr, str] = {}
        self.tie: dict[str, str] = {}
        self.plans: dict[str, Plan] = {}
        self.factor: dict[Node, float] = {}

    def run(self) -> Annotation:
        for expr in reversed(self.view.order):
            self._ask(expr)
        for node in self.view.traced.graph.inputs:
            self._place_edges(node, None)
        for expr in self.view.order:
            self._place(expr)
        self._share()
        self._place_weights()
        self._place_biases()
        return self._result()

    # -- what readers ask for -----------------------------------------------------------------------

    def _ask(self, expr: Expr) -> None:
        call = self.calls.get(expr)
        if call is None or self.chains.interior(expr):
            return
        if self.view.on_integers(expr):
            plan: Plan | None = self.chains.input_plan(expr)
        elif self.view.carries(expr):
            asked = _distinct([p for n in expr.outputs for p, _ in self.wants.get(n, [])])
            plan = asked[0] if len(asked) == 1 else None
            if not all(self._all_ask(n) for n in expr.outputs):
                self.mixed.add(expr)
        else:
            plan = None
        if plan is not None:
            if expr not in self.mixed:
                self.asks[expr] = plan.describe()
            for node in dict.fromkeys(call.inputs):
                self.wants.setdefault(node, []).insert(0, (plan, expr))

    def _all_ask(self, node: TensorNode) -> bool:
        """Whether whoever reads the value of ``node``, moved or not, asks for integers."""
        readers = [e for _, e in self.wants.get(node, []) if e not in self.mixed]
        calls = ((user, self.calls.get(user)) for user in node.users)
        blind = [user for user, call in calls if call is not None and call.role is Role.SHAPE]
        return self.view.all_values_read_by(node, [*readers, *blind])

    # -- where fake quants go -----------------------------------------------------------------------

    def _place(self, expr: Expr) -> None:
        if self.view.carries(expr):
            before = self.calls[expr].inputs[0]
            source = self._read(expr, before)
            factor = self._factor(expr, before) * self.view.scaling.get(expr, 1.0)
            for node in expr.outputs:
                if source:
                    self.state[node] = source
                    self.factor[node] = factor
                self._place_edges(node, self.plans[source] if source else None)
            return
        head = self.chains.head.get(expr)
        if head is None:
            for node in expr.outputs:
                self._place_edges(node, None)
        elif self.chains.tail[head] is expr:
            self._place_output(head, expr.outputs[0])

    def _place_output(self, head: Expr, node: TensorNode) -> None:
        call = self.calls[head]
        own, fixed = self.chains.output_plan(head)
        if call.role is Role.CONCAT and self.view.backend.ties_concat:
            groups = [self._read(head, n) for n in call.inputs]
            for group in groups[1:]:
                self._tie(groups[0], group)
            self.state[node] = groups[0]
            self._place_edges(node, own)
            return
        asked = _distinct([p for p, _ in self.wants.get(node, [])])
        unrounded = not self.chains.output_choice(head).quantize_output
        unrounded |= len(asked) > 1 or self.view.must_not_vanish(node)
        if unrounded and not fixed:
            self._place_edges(node, None)
            return
        # A result with a scheme of its own is rounded once where readers want that scheme: by their observer.
        fitting = [p for p in asked if not fixed or p.scheme == own.scheme]
        plan = fitting[0] if fitting else own
        self._add(Site(node.name, "activation", node.name, None, node.name, plan))
        self.state[node] = node.name
        self._place_edges(node, plan)

    def _place_edges(self, node: Node, present: Plan | None) -> None:
        """Sites between ``node`` and those readers that ask for other parameters than are ``present``.

        A move asks for what its readers want; where one of them wants the float value, there is no site
        before it, and the others round what it moved.
        """
        asked = [(p, e) for p, e in self.wants.get(node, []) if e not in self.mixed]
        for plan in _distinct([p for p, _ in asked if p != present]):
            readers = [e for p, e in asked if p == plan]
            first = readers[0].outputs[0].name
            every = node.name not in self.plans and self.view.all_values_read_by(node, readers)
            name = node.name if every else f"{node.name}__{first}"
            names = tuple(e.outputs[0].name for e in readers)
            static = isinstance(node.expr, (GetAttr, Constant))
            self._add(Site(name, "activation", node.name, names, name, plan, static=static))
            for reader in readers:
                self.reads[reader, node] = name

    def _add(self, site: Site) -> None:
        axis = site.plan.scheme.axis if site.plan is not None and site.sort == "activation" else None
        if axis is not None:
            site = dataclasses.replace(site, channel_axes=(axis,))
        self.sites.append(site)
        if site.plan is not None:
            self.plans[site.name] = site.plan

    def _read(self, expr: Expr, node: Node) -> str:
        return self.reads.get((expr, node)) or self.state.get(node, "")

    def _factor(self, expr: Expr, node: Node) -> float:
        """By what the scale of the group that ``expr`` reads is multiplied there."""
        return 1.0 if (expr, node) in self.reads else self.factor.get(node, 1.0)

    def _tie(self, first: str, second: str) -> None:
        if not first or not second:
            return
        a, b = self._group(first), self._group(second)
        if a != b and self.plans[a] == self.plans[b]:
            self.tie[b] = a

    def _group(self, name: str) -> str:
        while name in self.tie:
            name = self.tie[name]
        return name

    def _share(self) -> None:
        """Ties what the calls of one module read, and what they give, where the config says so."""
        first: dict[object, Expr] = {}
        for head in self.view.order:
            if self.chains.head.get(head) is not head or not self.view.choices[head].share:
                continue
            call = self.calls[head]
            key = call.weight if call.weight is not None else (call.kind, module_path(head))
            model = self.calls[first.setdefault(key, head)]
            for one, other in zip(model.inputs, call.inputs, strict=False):
                self._tie(self._read(model.expr, one), self._read(head, other))
            ends = [self.chains.tail[e].outputs[0] for e in (model.expr, head)]
            self._tie(self.state.get(ends[0], ""), self.state.get(ends[1], ""))

    # -- parameters ---------------------------------------------------------------------------------

    def _place_weights(self) -> None:
        asked: dict[Node, list[tuple[tuple[Plan, tuple[int, ...]], Expr]]] = {}
        nodes: dict[Node, TensorNode] = {}
        fixed = fixed_nodes(self.view.traced)
        for expr in self.view.order:
            call = self.calls.get(expr)
            if call is None or call.weight is None or self.chains.head.get(expr) is not expr:
                continue
            if is_float_tensor(call.weight):
                nodes[call.weight] = call.weight
                asked.setdefault(call.weight, []).append((self.view.weight_plan(call), expr))
        for key, wanted in asked.items():
            node = nodes[key]
            plans = _distinct([p for p, _ in wanted])
            for index, (plan, axes) in enumerate(plans):
                readers = [e for p, e in wanted if p == (plan, axes)]
                name = node.name if index == 0 else f"{node.name}__{readers[0].outputs[0].name}"
                names = tuple(e.outputs[0].name for e in readers)
                static = node in fixed
                self._add(Site(name, "weight", node.name, names, name, plan, axes, static))
                self.weight_site.update((e, name) for e in readers)

    def _place_biases(self) -> None:
        readers: dict[Node, int] = {}
        fixed = fixed_nodes(self.view.traced)
        for expr in self.view.order:
            call = self.calls.get(expr)
            if call is None or call.bias is None or expr not in self.weight_site:
                continue
            group = self._read(expr, call.inputs[0])
            if not group or expr in self.chains.norm or self.plans[group].scheme.per_channel:
                continue
            count = readers.get(call.bias, 0)
            readers[call.bias] = count + 1
            name = call.bias.name if count == 0 else f"{call.bias.name}__{call.out.name}"
            weight, names = self.weight_site[expr], (call.out.name,)
            static = call.bias in fixed
            site = Site(name, "bias", call.bias.name, names, name, None, static=static)
            factor = self._factor(expr, call.inputs[0])
            self.sites.append(dataclasses.replace(site, activation=group, weight=weight, factor=factor))

    # -- the result ---------------------------------------------------------------------------------

    def _result(self) -> Annotation:
        sites = tuple(
            dataclasses.replace(s, group=self._group(s.group), activation=self._group(s.activation))
            for s in self.sites
        )
        at_site = {s.node for s in sites if s.consumers is None}
        carried = {
            n.name: self._group(self.state[n])
            for e in self.view.order
            for n in e.outputs
            if n in self.state and n.name not in at_site
        }
        groups = {key: self._group(name) for key, name in self.state.items()}
        reads = {key: self._group(name) for key, name in self.reads.items()}
        notes = Notes(self.view, self.chains, groups, reads, self.weight_site, self.plans, self.asks).all()
        folds = tuple(self._fold(e) for e in self.view.order if e in self.chains.norm)
        ends = (self.view.traced.graph.inputs, self.view.traced.graph.outputs)
        inputs, outputs = (tuple(n.name for n in nodes if isinstance(n, TensorNode)) for nodes in ends)
        name = self.view.backend.name
        factors = {
            n.name: self.factor[n]
            for e in self.view.order
            for n in e.outputs
            if n.name in carried and self.factor.get(n, 1.0) != 1.0
        }
        return Annotation(name, notes, sites, carried, folds, inputs=inputs, outputs=outputs, factors=factors)

    def _fold(self, layer: Expr) -> Fold:
        group = self._group(self._read(layer, self.calls[layer].inputs[0]))
        names = (layer.outputs[0].name, self.chains.norm[layer].outputs[0].name)
        weight = self.weight_site[layer]
        if self.plans[weight].scheme.power_of_two:
            raise ConfigError(
                f"site {weight}: with its BatchNorm {names[1]} kept in training, the scales of the folded "
                "weights are no powers of two: set qat: {bn: {fold: true}}, or power_of_two: false there."
            )
        return Fold(*names, self.weight_site[layer], group)


def _distinct(values: list[_T]) -> list[_T]:
    """The different values, in order of first appearance (plans need not be hashable)."""
    found: list[_T] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
