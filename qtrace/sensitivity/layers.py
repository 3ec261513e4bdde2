"""The layers of a quantized graph: what a rule of a config can raise to more bits or to float."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from qtrace.preparation.annotation import Annotation, ExprNote, Plan

__all__ = ["Layer", "active_groups", "find_layers"]

_FLOAT_BITS = 32


@dataclass(frozen=True)
class Layer:
    """Ops that are raised together: those with one weight, or one op without.

    Attributes:
        name: the node that the first of its ops gives.
        nodes: what its ops and those fused with them give: what a rule is matched with.
        kind: the kind of op.
        path: the module that it comes from.
        macs: multiplications with accumulation, at the shapes that were traced.
        reads: the groups of activations that it reads.
        gives: the groups of its results.
        weight: the group of its weight, "" for none.
        biases: the sites of its biases.
        parameters: how many values its weight has.
        weight_bits: of the weight, 32 for a float one.
        activation_bits: of what it reads, the most of them.
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
        """What the weight takes, its scales left out."""
        return -(-self.parameters * self.weight_bits // 8)


def find_layers(annotation: Annotation, parameters: dict[str, int]) -> tuple[Layer, ...]:
    """The layers that are computed on integers, in graph order.

    Args:
        annotation: the decisions for a graph.
        parameters: group of a weight -> how many values it has.
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
) -> Layer:
    first = notes[0]
    chains = [note for head in notes for note in (head, *tails.get(head.name, ()))]
    weight = group.get(first.weight, first.weight)
    reads = frozenset(group.get(name, name) for note in chains for name in note.inputs if name)
    bits = [plans[name].scheme.bits for name in reads if name in plans]
    return Layer(
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
    layers: Iterable[Layer], raised: Collection[str], *, weights: bool = True, activations: bool = True
) -> frozenset[str]:
    """The groups, and the sites of biases, that are still rounded when some layers are raised.

    A tensor is rounded as long as one layer that stays reads it, or gives it.

    Args:
        layers: all layers of the graph.
        raised: the names of those that are.
        weights, activations: whether raising a layer concerns its weight, and what it reads and gives.
    """
    found: set[str] = set()
    for layer in layers:
        up = layer.name in raised
        if not (up and weights):
            found.add(layer.weight)
        if not (up and activations):
            found.update((*layer.reads, *layer.gives, *layer.biases))
    return frozenset(found - {""})
