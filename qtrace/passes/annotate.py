"""Annotate: decides for every expr and tensor what is quantized, how, and why. It changes nothing.

Three sweeps over the flat graph. *Chains*: which ops the backend computes as one (conv + relu).
*Wants*, backwards: which parameters the readers of a tensor ask for, seen through ops that only move
values. *Sites*, forwards: where a fake quant goes; values stay integers through moves.
"""

from __future__ import annotations

from typing import TypeVar

from qtrace import backends, ops
from qtrace.backends import Backend
from qtrace.config import QConfig, Spec
from qtrace.graph.types import Constant, Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, module_path, op_label, owner, users
from qtrace.ops import OpCall, Role
from qtrace.passes.annotation import Annotation, ExprNote, Fold, Plan, Site
from qtrace.passes.select import Choice, choose
from qtrace.scheme import QScheme

__all__ = ["annotate"]

_T = TypeVar("_T")
_INT_ROLES = (Role.COMPUTE, Role.ELEMENTWISE, Role.ACTIVATION, Role.NORM, Role.CONCAT)


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
    calls = {id(e): c for e in exprs(traced) if (c := ops.read(e)) is not None}
    choices = choose(traced, calls, qconfig, backend)
    return _Annotator(traced, calls, choices, backend).run()


class _Annotator:
    def __init__(
        self, traced: TracedModule, calls: dict[int, OpCall], choices: dict[int, Choice], backend: Backend
    ) -> None:
        self.traced, self.calls, self.choices, self.backend = traced, calls, choices, backend
        self.order = exprs(traced)
        self.outputs = {id(n) for n in traced.graph.outputs}
        self.float_reason: dict[int, str] = {}
        self.head: dict[int, Expr] = {}
        self.tail: dict[int, Expr] = {}
        self.wants: dict[int, list[tuple[Plan, Expr]]] = {}
        self.sites: list[Site] = []
        self.state: dict[int, str] = {}
        self.reads: dict[tuple[int, int], str] = {}
        self.weight_site: dict[int, str] = {}
        self.tie: dict[str, str] = {}
        self.plans: dict[str, Plan] = {}
        self.norm: dict[int, Expr] = {}

    def run(self) -> Annotation:
        for expr in self.order:
            self._classify(expr)
        for expr in self.order:
            self._chain(expr)
        for expr in reversed(self.order):
            self._ask(expr)
        for node in self.traced.graph.inputs:
            self._place_edges(node, None)
        for expr in self.order:
            self._place(expr)
        self._place_weights()
        self._place_biases()
        return self._result()

    # -- which ops run on integers, and as one ------------------------------------------------------

    def _classify(self, expr: Expr) -> None:
        """Notes why ``expr`` stays float; an expr without a note runs on integers or carries them."""
        call = self.calls.get(id(expr))
        if call is None:
            self.float_reason[id(expr)] = ops.unsupported(expr)
            return
        choice = self.choices[id(expr)]
        if choice.quantize is False:
            self.float_reason[id(expr)] = f"{choice.rules[-1]} says quantize: false"
        elif call.role is Role.FLOAT:
            self.float_reason[id(expr)] = call.reason
        elif not all(is_float_tensor(n) for n in (*call.inputs, *call.outputs)):
            self.float_reason[id(expr)] = "its values are not float32"
        elif call.role in _INT_ROLES and call.kind not in self.backend.ops:
            self.float_reason[id(expr)] = f"backend {self.backend.name} has no integer kernel for {call.kind}"

    def _on_integers(self, expr: Expr) -> bool:
        """Whether ``expr`` (the head of its chain) computes on quantized inputs."""
        call = self.calls.get(id(expr))
        return call is not None and call.role in _INT_ROLES and id(expr) not in self.float_reason

    def _carries(self, expr: Expr) -> bool:
        call = self.calls.get(id(expr))
        return call is not None and call.role is Role.CARRY and id(expr) not in self.float_reason

    def _chain(self, expr: Expr) -> None:
        """Lets ``expr`` take the following norm and activation into its kernel."""
        if id(expr) in self.head or not self._on_integers(expr):
            return
        call = self.calls[id(expr)]
        self.head[id(expr)] = self.tail[id(expr)] = expr
        follower = self._only_user(expr)
        if follower is not None and self._folds(call, self.calls[id(follower)]):
            self._join(expr, follower)
            self.norm[id(expr)] = follower
            follower = self._only_user(follower)
        fused = self.backend.fused.get(call.kind, frozenset())
        if follower is not None and self.calls[id(follower)].kind in fused:
            self._join(expr, follower)

    def _folds(self, layer: OpCall, norm: OpCall) -> bool:
        """Whether ``norm`` can stay and be folded into ``layer`` whenever it does not train."""
        if norm.role is not Role.NORM or layer.weight is None or owner(norm.expr) is None:
            return False
        plan, axes = self._weight_plan(layer)
        alone = len(layer.weight.users) == 1 and isinstance(layer.weight.expr, GetAttr)
        return alone and bool(axes) and plan.scheme.symmetric and plan.scheme.signed

    def _join(self, head: Expr, member: Expr) -> None:
        self.head[id(member)] = head
        self.tail[id(head)] = member

    def _only_user(self, expr: Expr) -> Expr | None:
        node = expr.outputs[0]
        if len(node.users) != 1 or id(node) in self.outputs:
            return None
        user = node.users[0]
        call = self.calls.get(id(user))
        alone = call is not None and id(user) not in self.float_reason and call.inputs == (node,)
        return user if alone else None

    # -- what readers ask for -----------------------------------------------------------------------

    def _plan(self, expr: Expr) -> Plan:
        choice = self.choices[id(self.head.get(id(expr), expr))]
        return _plan(choice.activation, choice.activation_observer, choice.fakequant)

    def _ask(self, expr: Expr) -> None:
        call = self.calls.get(id(expr))
        if call is None or self._interior(expr):
            return
        if self._on_integers(expr):
            plan: Plan | None = self._plan(expr)
        elif self._carries(expr):
            asked = _distinct([p for n in expr.outputs for p, _ in self.wants.get(id(n), [])])
            plan = asked[0] if len(asked) == 1 else None
        else:
            plan = None
        if plan is not None:
            for node in dict.fromkeys(call.inputs):
                self.wants.setdefault(id(node), []).insert(0, (plan, expr))

    def _interior(self, expr: Expr) -> bool:
        """Whether ``expr`` is fused into another: its input is not a tensor of its own."""
        return id(expr) in self.head and self.head[id(expr)] is not expr

    # -- where fake quants go -----------------------------------------------------------------------

    def _place(self, expr: Expr) -> None:
        if self._carries(expr):
            source = self._read(expr, self.calls[id(expr)].inputs[0])
            for node in expr.outputs:
                if source:
                    self.state[id(node)] = source
                self._place_edges(node, self.plans[source] if source else None)
            return
        head = self.head.get(id(expr))
        if head is None:
            for node in expr.outputs:
                self._place_edges(node, None)
        elif self.tail[id(head)] is expr:
            self._place_output(head, expr.outputs[0])

    def _place_output(self, head: Expr, node: TensorNode) -> None:
        call, own = self.calls[id(head)], self._plan(head)
        if call.role is Role.CONCAT and self.backend.ties_concat:
            groups = [self._read(head, n) for n in call.inputs]
            for group in groups[1:]:
                self._tie(groups[0], group)
            self.state[id(node)] = groups[0]
            self._place_edges(node, own)
            return
        asked = _distinct([p for p, _ in self.wants.get(id(node), [])])
        if len(asked) > 1:
            self._place_edges(node, None)
            return
        self._add(Site(node.name, "activation", node.name, None, node.name, asked[0] if asked else own))
        self.state[id(node)] = node.name

    def _place_edges(self, node: Node, present: Plan | None) -> None:
        """Sites between ``node`` and those readers that ask for other parameters than are ``present``."""
        asked = self.wants.get(id(node), [])
        for plan in _distinct([p for p, _ in asked if p != present]):
            readers = [e for p, e in asked if p == plan]
            first = readers[0].outputs[0].name
            every = self._all_values_read_by(node, readers)
            name = node.name if every else f"{node.name}__{first}"
            names = tuple(e.outputs[0].name for e in readers)
            static = isinstance(node.expr, (GetAttr, Constant))
            self._add(Site(name, "activation", node.name, names, name, plan, static=static))
            for reader in readers:
                self.reads[id(reader), id(node)] = name

    def _all_values_read_by(self, node: Node, readers: list[Expr]) -> bool:
        """Whether nothing but ``readers`` and shape arithmetic sees ``node``."""
        others = [u for u in users(node) if u not in readers]
        return id(node) not in self.outputs and not any(is_float_tensor(n) for u in others for n in u.outputs)

    def _add(self, site: Site) -> None:
        if site.plan is not None and site.plan.scheme.per_channel and site.sort == "activation":
            axis = site.plan.scheme.axis
            site = Site(**{**site.__dict__, "channel_axes": (axis,)})
        self.sites.append(site)
        if site.plan is not None:
            self.plans[site.name] = site.plan

    def _read(self, expr: Expr, node: Node) -> str:
        return self.reads.get((id(expr), id(node))) or self.state.get(id(node), "")

    def _tie(self, first: str, second: str) -> None:
        a, b = self._group(first), self._group(second)
        if a != b and self.plans[a] == self.plans[b]:
            self.tie[b] = a

    def _group(self, name: str) -> str:
        while name in self.tie:
            name = self.tie[name]
        return name

    # -- parameters ---------------------------------------------------------------------------------

    def _place_weights(self) -> None:
        asked: dict[int, list[tuple[tuple[Plan, tuple[int, ...]], Expr]]] = {}
        nodes: dict[int, TensorNode] = {}
        for expr in self.order:
            call = self.calls.get(id(expr))
            if call is None or call.weight is None or self.head.get(id(expr)) is not expr:
                continue
            if is_float_tensor(call.weight):
                nodes[id(call.weight)] = call.weight
                asked.setdefault(id(call.weight), []).append((self._weight_plan(call), expr))
        for key, wanted in asked.items():
            node = nodes[key]
            plans = _distinct([p for p, _ in wanted])
            for index, (plan, axes) in enumerate(plans):
                readers = [e for p, e in wanted if p == (plan, axes)]
                name = node.name if index == 0 else f"{node.name}__{readers[0].outputs[0].name}"
                names = tuple(e.outputs[0].name for e in readers)
                static = isinstance(node.expr, (GetAttr, Constant))
                self._add(Site(name, "weight", node.name, names, name, plan, axes, static))
                self.weight_site.update((id(e), name) for e in readers)

    def _weight_plan(self, call: OpCall) -> tuple[Plan, tuple[int, ...]]:
        choice = self.choices[id(call.expr)]
        scheme, axes = choice.weight, call.channel_axes
        if not scheme.per_channel or (call.kind == "conv_transpose2d" and len(axes) > 1):
            # Runtimes have no per-channel scales for grouped transposed convolutions.
            scheme, axes = scheme.replace(axis=None), ()
        else:
            scheme = scheme.replace(axis=0)
        return _plan(scheme, choice.weight_observer, choice.fakequant), axes

    def _place_biases(self) -> None:
        readers: dict[int, int] = {}
        for expr in self.order:
            call = self.calls.get(id(expr))
            if call is None or call.bias is None or id(expr) not in self.weight_site:
                continue
            group = self._read(expr, call.inputs[0])
            if not group or id(expr) in self.norm or self.plans[group].scheme.per_channel:
                continue
            count = readers.get(id(call.bias), 0)
            readers[id(call.bias)] = count + 1
            name = call.bias.name if count == 0 else f"{call.bias.name}__{call.out.name}"
            weight = self.weight_site[id(expr)]
            self.sites.append(
                Site(
                    name,
                    "bias",
                    call.bias.name,
                    (call.out.name,),
                    name,
                    None,
                    static=True,
                    activation=group,
                    weight=weight,
                )
            )

    # -- the result ---------------------------------------------------------------------------------

    def _result(self) -> Annotation:
        notes = tuple(self._note(e) for e in self.order if not isinstance(e, (GetAttr, Constant)))
        sites = tuple(
            Site(**{**s.__dict__, "group": self._group(s.group), "activation": self._group(s.activation)})
            for s in self.sites
        )
        at_site = {s.node for s in sites if s.consumers is None}
        carried = {
            n.name: self._group(self.state[id(n)])
            for e in self.order
            for n in e.outputs
            if id(n) in self.state and n.name not in at_site
        }
        folds = tuple(self._fold(e) for e in self.order if id(e) in self.norm)
        return Annotation(self.backend.name, notes, sites, carried, folds)

    def _fold(self, layer: Expr) -> Fold:
        group = self._group(self._read(layer, self.calls[id(layer)].inputs[0]))
        names = (layer.outputs[0].name, self.norm[id(layer)].outputs[0].name)
        return Fold(*names, self.weight_site[id(layer)], group)

    def _note(self, expr: Expr) -> ExprNote:
        call, head = self.calls.get(id(expr)), self.head.get(id(expr))
        state = "float"
        if head is not None:
            state = "int" if head is expr else "fused"
        elif self._carries(expr) and any(id(n) in self.state for n in expr.outputs):
            state = "carried"
        output = self.state.get(id(expr.outputs[0]), "") if expr.outputs else ""
        return ExprNote(
            name=expr.outputs[0].name if expr.outputs else "",
            op=op_label(expr),
            kind=call.kind if call else "",
            role=call.role.value if call else "",
            path=module_path(expr),
            state=state,
            into=head.outputs[0].name if state == "fused" and head is not None else "",
            inputs=tuple(self._group(self._read(expr, n)) for n in call.inputs) if call else (),
            output=self._group(output),
            scheme=self.plans[output].scheme.describe() if output else "",
            weight=self.weight_site.get(id(expr), ""),
            rule=call.rule if call else "",
            matched=self.choices[id(expr)].rules if call else (),
            reason=self._reason(expr, state),
        )

    def _reason(self, expr: Expr, state: str) -> str:
        if state != "float":
            return ""
        if self._carries(expr):
            return "its input is float and no reader asks for integers"
        if not any(is_float_tensor(n) for n in expr.outputs):
            return "integer or shape arithmetic"
        return self.float_reason.get(id(expr), "")


def _plan(scheme: QScheme, observer: Spec, fakequant: Spec) -> Plan:
    return Plan(
        scheme,
        observer.name,
        tuple(sorted(observer.options.items())),
        fakequant.name,
        tuple(sorted(fakequant.options.items())),
    )


def _distinct(values: list[_T]) -> list[_T]:
    """The different values, in order of first appearance (plans need not be hashable)."""
    found: list[_T] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
