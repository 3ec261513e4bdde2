"""The float values of weights that algorithms of `ptq` have changed, for layers that are raised to float."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import exprs, get_module
from qtrace.preparation.annotation import Annotation
from qtrace.ptq.layers.quantized import write
from qtrace.sensitivity.layers import Layer

__all__ = ["FloatValues"]


class FloatValues:
    """Weights and biases of the float network, beside those of the graph that was prepared from it.

    A layer in float has the network's weight. Without this, it would keep the one whose roundings, say,
    ``gptq`` has chosen, and raising it would seem to gain nothing.

    Args:
        prepared: the graph.
        twin: the float network, with the same nodes.
        annotation: of the graph.
        layers: of the graph.
    """

    def __init__(
        self, prepared: TracedModule, twin: TracedModule, annotation: Annotation, layers: Iterable[Layer]
    ) -> None:
        self.prepared = prepared
        path = {e.outputs[0].name: e.name for e in exprs(prepared) if isinstance(e, GetAttr) and e.outputs}
        weights = {s.group: path.get(s.node) for s in annotation.sites if s.sort == "weight"}
        biases = {s.name: path.get(s.node) for s in annotation.sites if s.sort == "bias"}
        self.changed: dict[str, list[tuple[str, np.ndarray, np.ndarray]]] = {}
        for layer in layers:
            for name in (weights.get(layer.weight), *(biases.get(bias) for bias in sorted(layer.biases))):
                if name is None:
                    continue
                theirs, ours = (get_module(model, name).numpy().copy() for model in (twin, prepared))
                if theirs.size == ours.size and not np.array_equal(theirs.ravel(), ours.ravel()):
                    self.changed.setdefault(layer.name, []).append((name, theirs, ours))

    @contextmanager
    def of(self, raised: Collection[str]) -> Iterator[None]:
        """Gives some layers, by name, their float values for the block."""
        found = [entry for name in raised for entry in self.changed.get(name, ())]
        try:
            for name, theirs, _ in found:
                write(self.prepared, name, theirs)
            yield
        finally:
            for name, _, ours in found:
                write(self.prepared, name, ours)
