"""Layers that can be raised: the groups and weights that are then in float, and the recipe for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.config import QConfig, Rule
from qtrace.config.recipe import SCHEMA
from qtrace.config.tree import dump
from qtrace.errors import ConfigError
from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import exprs, get_module
from qtrace.preparation.annotation import Annotation, ExprNote, Plan
from qtrace.ptq.layers.quantized import write
from qtrace.storage.outputs import WRITTEN

_FLOAT_BITS = np.finfo(np.float32).bits


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


class FloatValues:
    """The weights and biases of the float network and of the graph that was prepared from it.

    A layer in float must have the network's weight. With the weight that, say, ``gptq`` has rounded, raising
    the layer would seem to gain nothing.

    Args:
        prepared: the prepared graph.
        twin: the float network, with the same nodes.
        annotation: the annotation of the prepared graph.
        layers: the layers of the prepared graph.
    """

    def __init__(
        self,
        prepared: TracedModule,
        twin: TracedModule,
        annotation: Annotation,
        layers: Iterable[RaisableLayer],
    ) -> None:
        self.prepared = prepared
        paths = {e.outputs[0].name: e.name for e in exprs(prepared) if isinstance(e, GetAttr) and e.outputs}
        weights = {s.group: paths.get(s.node) for s in annotation.sites if s.sort == "weight"}
        biases = {s.name: paths.get(s.node) for s in annotation.sites if s.sort == "bias"}
        self.changed: dict[str, list[tuple[str, np.ndarray, np.ndarray]]] = {}
        for layer in layers:
            for name in (weights.get(layer.weight), *(biases.get(bias) for bias in sorted(layer.biases))):
                if name is None:
                    continue
                original, changed = (get_module(model, name).numpy().copy() for model in (twin, prepared))
                if original.size == changed.size and not np.array_equal(original.ravel(), changed.ravel()):
                    self.changed.setdefault(layer.name, []).append((name, original, changed))

    @contextmanager
    def of(self, raised: Collection[str]) -> Iterator[None]:
        """Gives the layers named in ``raised`` their float values inside the block."""
        entries = [entry for name in raised for entry in self.changed.get(name, ())]
        try:
            for name, original, _ in entries:
                write(self.prepared, name, original)
            yield
        finally:
            for name, _, changed in entries:
                write(self.prepared, name, changed)


_BITS = re.compile(r"(?:w(?P<weight>\d+))?(?:a(?P<activation>\d+))?")


@dataclass(frozen=True)
class Raise:
    """The bits of a raised layer.

    Attributes:
        weight: the bits of the layer's weight; None leaves them.
        activation: the bits of the layer's inputs; None leaves them. If both are None, the layer computes in
            float.
    """

    weight: int | None = None
    activation: int | None = None

    @classmethod
    def parse(cls, text: str) -> Raise:
        """Parses ``float``, ``a16``, ``w8`` or ``w8a16``.

        Raises:
            ConfigError: for any other text.
        """
        if text == "float":
            return cls()
        match = _BITS.fullmatch(text)
        bits = {key: int(value) for key, value in (match.groupdict() if match else {}).items() if value}
        if not bits or not all(2 <= n <= 16 for n in bits.values()):
            raise ConfigError(
                f"{text!r} is no way to raise a layer: give float, or bits such as a16 or w8a8."
            )
        return cls(**bits)

    def sides(self) -> dict[str, bool]:
        """Returns the arguments of a `Simulation` that say what raising a layer puts in float."""
        to_float = self == Raise()
        return {
            "weights": to_float or self.weight is not None,
            "activations": to_float or self.activation is not None,
        }

    def simulated(self) -> str:
        """Says which part of the raised layers is in float during the search."""
        if all(self.sides().values()):
            return "raised"
        return "raised weights" if self.weight is not None else "raised activations"

    def changes(self, layer: RaisableLayer) -> bool:
        """Whether raising changes the bits of a layer."""
        return self.bits(layer) != (layer.weight_bits, layer.activation_bits)

    def bits(self, layer: RaisableLayer) -> tuple[int, int]:
        """Returns the bits of weight and activations of a raised layer."""
        if self == Raise():
            return 32, 32
        weight = self.weight if layer.weight else None
        return weight or layer.weight_bits, self.activation or layer.activation_bits

    def rule(self, layers: Sequence[RaisableLayer]) -> Rule:
        """Returns the rule that raises ``layers``."""
        names = [name for layer in layers for name in layer.nodes]
        change: dict[str, Any] = {"match": {"name": names}}
        if self == Raise():
            return Rule.model_validate({**change, "quantize": False})
        if self.activation is not None:
            change["activation"] = {"bits": self.activation}
        if self.weight is not None:
            change["weight"] = {"bits": self.weight}
        return Rule.model_validate(change)

    def patched(self, qconfig: QConfig, layers: Sequence[RaisableLayer]) -> QConfig:
        """Returns ``qconfig`` with a rule that raises ``layers``."""
        if not layers:
            return qconfig
        return qconfig.model_copy(update={"rules": (*qconfig.rules, self.rule(layers))})


def patch_text(base: str, how: Raise, layers: Sequence[RaisableLayer], comment: Sequence[str]) -> str:
    """Returns a recipe file that imports another one and raises ``layers``.

    Args:
        base: name or path of the recipe to import.
        how: the bits of raised layers.
        layers: the layers to raise.
        comment: the lines of the comment at the top.
    """
    data: dict[str, Any] = {"schema": SCHEMA, "imports": [base]}
    if layers:
        data["rules"] = [how.rule(layers).to_dict()]
    return "".join(f"# {line}\n" for line in (f"{WRITTEN}.", *comment)) + dump(data)
