"""Chooses how each op is quantized, by the rules of a config in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qtrace.config import QConfig, Rule, Spec
from qtrace.config.backends import Backend
from qtrace.config.checking import check_method, check_plugin, check_scheme, prefix_errors
from qtrace.config.rule import Method, Placement
from qtrace.errors import ConfigError
from qtrace.graph.types import Expr, TracedModule
from qtrace.ops import OpCall
from qtrace.preparation.passes._matching import Selector
from qtrace.scheme import QScheme

__all__ = ["GIVEN", "Choice", "choose"]

GIVEN = "the file"
"""The origin of the choices that a quantized ONNX file brings."""


@dataclass(frozen=True)
class Choice:
    """The choice of a config for one op.

    Attributes:
        quantize: False keeps the op in float; None leaves it to the backend.
        decided: origin of the rule that set ``quantize``.
        activation: scheme of the op's input sites, and of its output if no consumer wants another.
        weight: scheme of the op's weight.
        activation_observer: observer of the op's activation sites.
        weight_observer: observer of the op's weight.
        fakequant: fake quant of all sites of the op.
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
    activation: QScheme
    weight: QScheme
    activation_observer: Spec
    weight_observer: Spec
    fakequant: Spec
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
    return Choice(
        None,
        activation,
        weight,
        qconfig.activation_observer,
        qconfig.weight_observer,
        qconfig.effective_fakequant,
        placement=qconfig.effective_placement,
        method=qconfig.effective_method,
        method_origin=qconfig.place("method"),
    )


def _apply(old: Choice, rule: Rule, backend: Backend) -> Choice:
    """Returns the choice ``old`` with the changes of ``rule``."""
    with prefix_errors(rule.origin):
        activation = rule.activation.apply(old.activation) if rule.activation else old.activation
        weight = rule.weight.apply(old.weight) if rule.weight else old.weight
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
        activation=activation,
        weight=weight,
        activation_observer=(observers.activation if observers else None) or old.activation_observer,
        weight_observer=(observers.weight if observers else None) or old.weight_observer,
        fakequant=rule.fakequant or old.fakequant,
        output=output,
        quantize_output=old.quantize_output if rule.quantize_output is None else rule.quantize_output,
        share=old.share if rule.share is None else rule.share,
        placement=rule.placement or old.placement,
        method=rule.method or old.method,
        method_origin=rule.origin if rule.method else old.method_origin,
        rules=(*old.rules, rule.origin),
        decided=old.decided if rule.quantize is None else rule.origin,
    )
    for sort, scheme, spec in (
        ("activation", activation, choice.activation_observer),
        ("weight", weight, choice.weight_observer),
    ):
        check_plugin("qtrace.observers", spec, sort, scheme, lambda _: rule.origin)
        if sort == "weight" or choice.method == "static":
            check_plugin("qtrace.fakequant", choice.fakequant, sort, scheme, lambda _: rule.origin)
    return choice
