"""Finds the layers of a quantized graph that a rule of a config can raise to more bits or to float."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from qtrace.preparation.annotation import Annotation, ExprNote, Plan

__all__ = ["RaisableLayer", "active_groups", "find_layers"]

_FLOAT_BITS = 32


@dataclass(frozen=True)
class RaisableLayer:
    """Ops that are raised together: all ops with the same weight, or one op without a weight.

    Attributes:
        name: the output node of the first op.
        nodes: the output nodes of the ops and of those fused with them, which rules match.
        kind: the kind of op.
        path: the path of the module that the layer comes from.
        macs: multiplications with accumulation, at the traced shapes.
        reads: the groups of activations that the layer reads.
        gives: the groups of the layer's results.
        weight: the group of the layer's weight, "" for none.
        biases: the sites of the layer's biases.
        parameters: the number of values of the weight.
        weight_bits: the bits of the weight, 32 for a float one.
        activation_bits: the bits of the widest activation that the layer reads, 32 for a float one.
    """

    name: str
    nodes: tuple[str, ...]
    kind: str
    path: str
    macs: int
    reads: frozenset[str]
    gives: frozenset[str]
    weight: str
    biases: frozenset[str]
    parameters: int
    weight_bits: int
    activation_bits: int

    @property
    def bops(self) -> int:
        """Bit operations: MACs times the bits of both factors (Baskin et al. 2018, UNIQ)."""
        return self.macs * self.weight_bits * self.activation_bits

    @property
    def weight_bytes(self) -> int:
        """The size of the weight in bytes, without its scales."""
        return -(-self.parameters * self.weight_bits // 8)


def find_layers(annotation: Annotation, parameters: dict[str, int]) -> tuple[RaisableLayer, ...]:
    """Finds the layers that compute on integers, in graph order.

    Args:
        annotation: the decisions for a graph.
        parameters: group of a weight -> the number of its values.
    """
    group = {site.name: site.group for site in annotation.sites}
    tails: dict[str, list[ExprNote]] = {}
    for note in annotation.notes:
        if note.state == "fused":
            tails.setdefault(note.into, []).append(note)
    calls: dict[str, list[ExprNote]] = {}
    for note in annotation.notes:
        if note.state == "int":
            calls.setdefault(group.get(note.weight, "") or note.name, []).append(note)
    plans = {site.group: site.plan for site in annotation.sites if site.plan is not None}
    biases: dict[str, list[str]] = {}
    for site in annotation.sites:
        if site.sort == "bias":
            for name in site.consumers or ():
                biases.setdefault(name, []).append(site.name)
    return tuple(_layer(notes, tails, group, plans, biases, parameters) for notes in calls.values())


def _layer(
    notes: list[ExprNote],
    tails: dict[str, list[ExprNote]],
    group: dict[str, str],
    plans: dict[str, Plan],
    biases: dict[str, list[str]],
    parameters: dict[str, int],
) -> RaisableLayer:
    first = notes[0]
    chains = [note for head in notes for note in (head, *tails.get(head.name, ()))]
    weight = group.get(first.weight, first.weight)
    reads = frozenset(group.get(name, name) for note in chains for name in note.inputs if name)
    bits = [plans[name].scheme.bits for name in reads if name in plans]
    return RaisableLayer(
        name=first.name,
        nodes=tuple(note.name for note in chains),
        kind=first.kind,
        path=first.path,
        macs=sum(note.macs for note in notes),
        reads=reads - {weight},
        gives=frozenset(group.get(note.output, note.output) for note in chains if note.output),
        weight=weight,
        biases=frozenset(name for note in notes for name in biases.get(note.name, ())),
        parameters=parameters.get(weight, 0),
        weight_bits=plans[weight].scheme.bits if weight in plans else _FLOAT_BITS,
        activation_bits=max(bits, default=_FLOAT_BITS),
    )


def active_groups(
    layers: Iterable[RaisableLayer],
    raised: Collection[str],
    *,
    weights: bool = True,
    activations: bool = True,
) -> frozenset[str]:
    """Returns the groups, and the sites of biases, that are still rounded when some layers are raised.

    A tensor is rounded as long as a layer that is not raised reads it or computes it.

    Args:
        layers: all layers of the graph.
        raised: the names of the raised layers.
        weights: whether raising a layer puts its weight in float.
        activations: whether raising a layer puts its inputs and results in float.
    """
    groups: set[str] = set()
    for layer in layers:
        is_raised = layer.name in raised
        if not (is_raised and weights):
            groups.add(layer.weight)
        if not (is_raised and activations):
            groups.update((*layer.reads, *layer.gives, *layer.biases))
    return frozenset(groups - {""})
